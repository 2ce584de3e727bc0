"""`python -m mmldlm` is the command `mmldlm`."""

from mmldlm.cli.main import main

if __name__ == "__main__":
    main()
