"""What plugins of the stage checkpoint share: who writes what, snapshots, commit by rename, agreement of ranks."""
