"""`python -m fedpress_server` is `fedpress serve`."""

from fedpress_server.serve import main

if __name__ == "__main__":
    main(program="python -m fedpress_server")
