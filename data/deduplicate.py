"""Remove exact duplicates from a corpus and tokenise it with datatrove on SLURM.

    pip install datatrove pyarrow regex tokenizers xxhash    # tested with datatrove 0.10.1
    python data/deduplicate.py

The script reads corpus/*.parquet and tokenizer.json, and writes tokens/*.ds. Set eos_token to the
eos_token of tokenizer_config.json, which is next to tokenizer.json.
"""

from datatrove.executor import SlurmPipelineExecutor
from datatrove.pipeline import dedup
from datatrove.pipeline.readers import ParquetReader
from datatrove.pipeline.tokens import DocumentTokenizer

TASKS, FINDERS = 500, 50


def content(document) -> bytes:
    return document.text.encode()


corpus, config = ParquetReader("corpus", text_key="text"), dedup.ExactDedupConfig(content)
hashing = [corpus, dedup.ExactDedupSignature("hashes", config, FINDERS)]
finding = [dedup.ExactFindDedups("hashes", "duplicates", config)]
tokenizer = DocumentTokenizer("tokens", "tokenizer.json", eos_token="<eos>", seed=0)
tokenising = [corpus, dedup.ExactDedupFilter("duplicates", config), tokenizer]
steps = {"hash": (hashing, TASKS), "find": (finding, FINDERS), "tokenise": (tokenising, TASKS)}
job = None
for name, (pipeline, tasks) in steps.items():
    options = {"job_name": name, "logging_dir": f"logs/{name}", "depends": job}
    job = SlurmPipelineExecutor(pipeline, tasks, time="10:00:00", partition="cpu", **options)
job.run()
