"""Engines that serve language-model policies to the rollouts."""
