"""`python -m hyperleak`."""

from hyperleak import main

if __name__ == "__main__":
    main()
