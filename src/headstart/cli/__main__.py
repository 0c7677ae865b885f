"""`python -m headstart.cli`, where no `headstart` is on the path."""

from headstart.cli import main

main()
