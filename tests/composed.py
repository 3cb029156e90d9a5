"""Configs as Hydra composes them of configs/ and a command line, which takes it 0.3 s: files are read once a choice."""

import copy
import functools

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from mxep.integration.app import register
from mxep.integration.schema import configs_dir


@functools.cache
def chosen(*overrides: str) -> DictConfig:
    register()
    with initialize_config_dir(str(configs_dir()), version_base="1.3"):
        return compose("config", list(overrides))


def composed(*overrides: str) -> DictConfig:
    """What Hydra composes; values are applied to a copy, by Hydra, too."""
    values = [word for word in overrides if "." in word.partition("=")[0] and not word.startswith("hydra.")]
    config = copy.deepcopy(chosen(*(word for word in overrides if word not in values)))
    ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides(values), config)
    return config
