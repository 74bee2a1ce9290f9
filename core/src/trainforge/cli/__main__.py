"""`python -m trainforge.cli`: the same as the command `forge`, and what every rank runs."""

from trainforge.cli import main

main(prog_name="forge")
