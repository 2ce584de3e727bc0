"""`python -m runwatch`."""

from runwatch.cli import main

if __name__ == "__main__":
    main()
