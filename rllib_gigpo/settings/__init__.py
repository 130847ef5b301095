"""The settings of GiGPOConfig, in groups; `rllib_gigpo.config` puts them together."""
