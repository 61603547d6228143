import json
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

events = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0, "tensors": 0})
events.Reload()
tags = events.Tags()
scalars = {tag: [[e.step, str(e.value)] for e in events.Scalars(tag)] for tag in tags["scalars"]}
texts = {}
for tag in tags["tensors"]:
    assert events.SummaryMetadata(tag).plugin_data.plugin_name == "text", tag
    texts[tag] = events.Tensors(tag)[0].tensor_proto.string_val[0].decode()
print(json.dumps({"scalars": scalars, "texts": texts}))
