"""Keys that the source of a corpus does not read are refused."""

import pytest

from diffllm import load_config
from diffllm.core.errors import ConfigError

MIXTURE = "data.sources={a: {source: files, paths: [a.jsonl]}}"


UNREAD = [
    (
        ["data.paths=[a.txt]", "data.split=test"],
        "data.split=test cannot be set with data.source=files",
    ),
    (["data=stdlib", "data.sample_by=line"], "data.sample_by=line cannot be set with"),
    (["data=packages", "data.prompt_column=x"], "data.prompt_column=x cannot be set with"),
    (["data.dataset=a/b", "data.sample_by=line"], "data.sample_by=line cannot be set with"),
    ([MIXTURE, "data.text_column=body"], "data.text_column=body cannot be set with"),
    ([MIXTURE, "data.split=test"], "data.split=test cannot be set with"),
    ([MIXTURE.replace("]}", "], split: test}")], "data.sources.a.split=test cannot be set with"),
]


@pytest.mark.parametrize(("words", "named"), UNREAD)
def test_config_refuses_data_key_that_is_unused_by_the_source(words, named):
    with pytest.raises(ConfigError) as caught:
        load_config(words)
    assert named in str(caught.value)
