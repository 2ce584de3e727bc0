"""`python -m traindoctor`: the same as the command `traindoctor`."""

from traindoctor.cli import main

if __name__ == "__main__":
    main()
