"""What tests of several packages share. Import as `tests.support.NAME`."""
