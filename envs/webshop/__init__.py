"""WebShop (Yao et al. 2022): shop for what an instruction describes, in text."""

from envs.webshop.env import WebShop, random_action

__all__ = ["WebShop", "random_action"]
