"""`python -m fedpress_server` is `fedpress server run`."""

from fedpress_server.command import main

if __name__ == "__main__":
    main()
