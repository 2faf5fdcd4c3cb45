"""Facts of the machine in which the runs of each seed agree, although runs of arms differ.

An example is the version of torch: a later version may have trained the later seeds of all arms.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from diffllm.compare.arms.comparability import conditions_of, text_of_values, value_text
from diffllm.compare.arms.run import Run
from diffllm.core.keys import Declarations
from diffllm.core.run_facts import machine_facts


def with_facts_of_seeds(
    values: Sequence[dict[str, Any]],
    runs: Sequence[Run],
    differing: Collection[str],
    declared: Declarations,
) -> list[dict[str, Any]]:
    """Combine the values of facts of the machine in arms whose runs of each seed agree.

    Such a fact does not distinguish these arms: a later version of torch may have trained more
    seeds. The fact of each run becomes a text of all values in these arms, "2.13 or 2.14". Only
    arms that agree in all other conditions are united, so that other runs of the report have no
    influence.
    """
    facts = sorted(set(machine_facts()).intersection(differing))
    others = sorted(set(differing).difference(facts))
    conditions = conditions_of(others, declared)
    all_arms: list[list[int]] = []
    arms_of_groups = []
    for places_of_group in places_by_values(conditions, values, range(len(runs))):
        arms = places_by_values(others, values, places_of_group)
        all_arms += arms
        arms_of_groups.append(arms)
    combined = list(values)
    for fact in facts:
        united = arms_equal_by_seed(fact, all_arms, runs, values)
        # Arms that differ in other conditions are united only if this unites all runs.
        if not united or len(united[0][1]) < len(runs):
            united = []
            for arms in arms_of_groups:
                united += arms_equal_by_seed(fact, arms, runs, values)
        for text, places in united:
            for i in places:
                combined[i] = combined[i] | {fact: text}
    return combined


def places_by_values(
    names: Sequence[str], values: Sequence[Mapping[str, Any]], places: Iterable[int]
) -> list[list[int]]:
    """Divide places of runs into lists of runs with equal values of `names`."""
    divided: dict[str, list[int]] = {}
    for i in places:
        identity = text_of_values(names, values[i])
        divided.setdefault(identity, []).append(i)
    return list(divided.values())


def arms_equal_by_seed(
    fact: str, arms: Sequence[list[int]], runs: Sequence[Run], values: Sequence[Mapping[str, Any]]
) -> list[tuple[str, list[int]]]:
    """Unite arms, given as places of runs, whose runs of each common seed agree in a fact.

    Return a text of all values and the runs of each union. Omit arms that agree with no other arm,
    except if there is only one arm.
    """
    united: list[tuple[dict[int, str], list[list[int]]]] = []
    for places in arms:
        facts_of_arm: dict[int, str] = {}
        is_unique = True
        for i in places:
            text = value_text(fact, values[i][fact])
            first_text = facts_of_arm.setdefault(runs[i].cfg.seed, text)
            is_unique = is_unique and text == first_text
        # An arm with two values for one seed agrees with no other arm.
        if not is_unique:
            continue
        for facts_by_seed, members in united:
            common = facts_by_seed.keys() & facts_of_arm.keys()
            if all(facts_by_seed[seed] == facts_of_arm[seed] for seed in common):
                # The next arm must also agree in the seeds that only this arm has.
                facts_by_seed.update(facts_of_arm)
                members.append(places)
                break
        else:
            united.append((facts_of_arm, [places]))
    unions: dict[str, list[int]] = {}
    for facts_by_seed, members in united:
        texts = sorted(set(facts_by_seed.values()))
        is_union = len(members) > 1 or len(arms) == 1
        if len(texts) > 1 and is_union:
            places_of_union = list(chain.from_iterable(members))
            # Two unions can have the same values in other seeds; only the first gets the text.
            unions.setdefault(" or ".join(texts), places_of_union)
    return list(unions.items())
