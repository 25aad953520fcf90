"""`python -m dovetail`: the command line without a script on the path."""

from dovetail.cli.main import main

main()
