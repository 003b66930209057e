"""What a client of Flower's simulation does.

In a file of its own, because Ray's actors import it: what is kept here then stays in an actor from
one client to the next.
"""

import os
from functools import cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

import work


@cache
def kept(name: str) -> tuple[work.Workload, work.Data, nn.Module, torch.Generator]:
    """Return what a process needs of a workload, made once in each."""
    torch.set_num_threads(1)
    workload = work.WORKLOADS[name]
    generator = torch.Generator().manual_seed(os.getpid())
    return workload, work.make_data(workload), work.make_model(workload), generator


client = ClientApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    """Train one client and answer with its weights."""
    name = str(message.content["config"]["workload"])
    workload, data, model, generator = kept(name)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    number = int(context.node_config["partition-id"])
    rows = slice(number * workload.samples, (number + 1) * workload.samples)
    images, labels = data.train_inputs[rows], data.train_labels[rows]
    steps = work.train_client(model, images, labels, workload.batch, generator)
    counts = {"num-examples": len(labels), "steps": steps, "clients": 1}
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(counts)}
    return Message(RecordDict(content), reply_to=message)
