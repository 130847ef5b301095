"""WebShop (Yao et al. 2022): shop for what an instruction describes, in text."""

from envs.webshop.env import WebShop

__all__ = ["WebShop"]
