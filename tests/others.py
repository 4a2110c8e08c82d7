"""A method as code bases of others write it."""

import torch
from torch import nn


class OthersTent(nn.Module):
    """TENT as others write it, from its equations."""

    def __init__(self, model, lr=1e-3):
        super().__init__()
        self.model = model.requires_grad_(False)
        learned = []
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.requires_grad_(True)
                layer.track_running_stats, layer.running_mean, layer.running_var = False, None, None
                learned += [layer.weight, layer.bias]
        self.optimizer = torch.optim.Adam(learned, lr=lr)

    def forward(self, x):
        logits = self.model(x)
        loss = -(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean(0)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return logits
