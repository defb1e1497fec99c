"""`python -m fedlaw` is the `fedlaw` command."""

from fedlaw.cli import main

main()
