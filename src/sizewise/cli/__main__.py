"""`python -m sizewise.cli` is the command line too."""

from sizewise.cli import main

if __name__ == "__main__":
    main()
