"""The docstring of a config explains its fields, and costs nothing until it is read."""

import dataclasses
import pickle
import pydoc
import subprocess
import sys

import cloudpickle

from rlstack import ReplayConfig
from rlstack.agents.ppo import PPOConfig
from rlstack.checks import Checked

MADE_OF_TEXT = '''
@dataclasses.dataclass(frozen=True)
class Own(Checked):
    """Options of my own."""

    size: int = 1
    """Its size."""
'''


def test_help_shows_the_meaning_of_each_field():
    shown = " ".join(pydoc.render_doc(ReplayConfig, renderer=pydoc.plaintext).split())
    for words in (
        "The rules of one table.",
        "batch_size: Items in one sample.",
        "min_size: Items that must be inserted before the first sample.",
        "priority_exponent: Exponent of priorities in sampling; 0 is uniform (alpha;",
    ):
        assert words in shown
    assert shown.index("batch_size: Items") < shown.index("min_size: Items")


def test_fields_of_base_classes_are_explained_first():
    shown = PPOConfig.__doc__
    assert "discount: Discount of future rewards, per step." in shown
    fields = [field.name for field in dataclasses.fields(PPOConfig)]
    at = [shown.index(f"\n  {name}: ") for name in fields if f"\n  {name}: " in shown]
    assert len(at) >= 8 and at == sorted(at)


def test_importing_configs_reads_no_source():
    code = (
        "import sys, rlstack.programs.config.experiment as e\n"
        "assert 'rlstack.imports.field_docs' not in sys.modules\n"
        "assert 'frames' in e.Experiment.__doc__ and 'rlstack.imports.field_docs' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_class_without_a_source_keeps_its_docstring_and_can_be_sent():
    found = {"dataclasses": dataclasses, "Checked": Checked, "__name__": "__main__"}
    exec(MADE_OF_TEXT, found)
    assert found["Own"].__doc__ == "Options of my own."
    sent = pickle.loads(cloudpickle.dumps(found["Own"](2)))
    assert (sent.size, type(sent).__doc__) == (2, "Options of my own.")
