"""`python -m backtape`: the command `backtape`, for where the scripts of packages are not on the
path."""

from backtape.command import main

main()
