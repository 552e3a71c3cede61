"""`python -m anybatch`, for where the command is not on the path."""

from anybatch.cli.entry import main

main()
