"""`python -m sizewise` is the command line."""

from sizewise.cli import main

if __name__ == "__main__":
    main()
