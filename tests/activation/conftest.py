"""Sites that tests share, and the SGLang they are run on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sites import CHECKOUT, CONFIG, Site, install, make_site

from sglang_hisparse_plugin.demo import releases


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the sdist, so that this is complete as well."""
    out = tmp_path_factory.mktemp("wheel")
    argv = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(CHECKOUT)]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    assert list(out.glob("*.tar.gz"))
    return next(out.glob("*.whl"))


@pytest.fixture(scope="session")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The plugin installed from its wheel."""
    installed = make_site(tmp_path_factory.mktemp("site") / "venv")
    install(installed, str(wheel))
    return installed


@pytest.fixture(scope="session")
def editable_site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The plugin installed with ``pip install -e``."""
    installed = make_site(tmp_path_factory.mktemp("editable") / "venv")
    install(installed, "-e", str(CHECKOUT))
    return installed


@pytest.fixture(scope="session")
def bare_site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """No plugin."""
    return make_site(tmp_path_factory.mktemp("bare") / "venv")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DeepSeek-V3.2 configuration without weights: enough to get as far as building a `Scheduler`."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(CONFIG)
    return folder


@pytest.fixture
def sglang(request: pytest.FixtureRequest) -> Path:
    """The release a test is parametrised with, unpacked."""
    return releases.fetch(request.param)
