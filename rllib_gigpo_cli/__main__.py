"""`python -m rllib_gigpo_cli` is `rllib-gigpo`."""

from rllib_gigpo_cli.app import main

if __name__ == "__main__":
    main()
