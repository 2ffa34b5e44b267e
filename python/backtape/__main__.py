"""`python -m backtape`: the command `backtape`, where scripts are not on the path."""

from backtape.command import main

main()
