"""`python -m fedpress` is the command `fedpress`."""

from fedpress.cli import main

if __name__ == "__main__":
    main()
