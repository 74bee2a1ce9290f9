"""One class of rules per stage."""
