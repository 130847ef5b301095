"""AppWorld: code that uses the APIs of everyday apps, run by AppWorld's own server process."""

from envs.appworld.env import AppWorld

__all__ = ["AppWorld"]
