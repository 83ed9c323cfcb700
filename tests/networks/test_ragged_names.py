"""Types and actions may have any names, but modules may not."""

import jax
import pytest

from rlstack.entity.games import MineSweeper
from rlstack.networks.ragged.entity_layout import module_names
from rlstack.networks.ragged.transformer import ragged_transformer


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["Robot", "__global__", "x2"], ["Robot", "__global__", "x2"]),
        (["Orbital Cannon"], ["Orbital_Cannon"]),
        (["a b", "a-b", "a_b"], ["a_b_", "a_b__", "a_b"]),
        (["2nd", "", "\u00e4"], ["_2nd", "_", "__"]),
    ],
)
def test_names_become_identifiers_that_differ(names, expected):
    found = module_names(names)
    assert [found[name] for name in names] == expected


def test_the_orbital_cannon_has_modules_of_its_own():
    env = MineSweeper(orbital_cannon=True)
    network = ragged_transformer(env.observation_spec(), env.action_spec())
    modules = jax.eval_shape(network.init, jax.random.PRNGKey(0))
    ends = {name.rsplit("/", 1)[-1] for name in modules}
    assert {"Orbital_Cannon_linear", "policy_head_Fire_Orbital_Cannon_query"} <= ends
