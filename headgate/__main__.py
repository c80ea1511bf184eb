"""`python -m headgate`, which is also how torchrun starts it."""

from headgate.cli import main

main()
