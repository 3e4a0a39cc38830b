"""Graph networks of PyTorch Geometric, on its own batches."""

import torch

from tests.foreign.specimen import Given, specimen


def graphs(count=64, batch_size=8, per_node=False):
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader

    found = []
    for _ in range(count):
        nodes = int(torch.randint(3, 7, ()))
        found.append(
            Data(
                x=torch.randn(nodes, 4, dtype=torch.float64),
                z=torch.randint(1, 9, (nodes,)),
                pos=2 * torch.randn(nodes, 3, dtype=torch.float64),
                edge_index=torch.randint(0, nodes, (2, 3 * nodes)),
                y=torch.randn(nodes if per_node else 1, 1, dtype=torch.float64),
            )
        )
    half, quarter = count // 2, 3 * count // 4
    parts = (found[:half], found[half:quarter], found[quarter:])
    train, valid, test = (DataLoader(part, batch_size=batch_size) for part in parts)
    return {"train": train, "valid": valid, "test": test}


class GraphNet(torch.nn.Module):
    """Two convolutions, a mean over the graph, and a head."""

    def __init__(self, head):
        from torch_geometric.nn import GCNConv, global_mean_pool

        super().__init__()
        self.first, self.second = GCNConv(4, 16), GCNConv(16, 16)
        self.pool, self.head = global_mean_pool, head

    def forward(self, x, edge_index, batch):
        x = self.second(self.first(x, edge_index).tanh(), edge_index).tanh()
        return self.head(self.pool(x, batch))


CALL = "forward=lambda m, b: m(b.x, b.edge_index, b.batch)"


def call(model, batch):
    return model(batch.x, batch.edge_index, batch.batch)


@specimen("torch_geometric", "GCNConv, a mean, nn.Linear", f"rg.LastLayerRigidity(model, {CALL})")
def pooled():
    model = GraphNet(torch.nn.Linear(16, 1)).double()
    return Given(model, **graphs(), readout=["head.weight", "head.bias"], output=call)


@specimen(
    "torch_geometric",
    "the same with PyG's own Linear",
    f'rg.LastLayerRigidity(model, layer="head", {CALL})',
)
def own_linear():
    from torch_geometric.nn import Linear

    model = GraphNet(Linear(16, 1)).double()
    return Given(model, **graphs(), readout=["head.weight", "head.bias"], output=call)


@specimen(
    "torch_geometric",
    "GCN that ends in a convolution, a value for each node",
    'rg.LastLayerRigidity(model, layer="convs.1", forward=lambda m, b: m(b.x, b.edge_index))',
)
def convolution():
    from torch_geometric.nn.models import GCN

    model = GCN(4, 12, num_layers=2, out_channels=1).double()
    return Given(
        model,
        **graphs(per_node=True),
        readout=["convs.1.lin.weight", "convs.1.bias"],
        output=lambda m, b: m(b.x, b.edge_index),
    )


@specimen(
    "torch_geometric",
    "SchNet",
    "rg.LastLayerRigidity(model, forward=lambda m, b: m(b.z, b.pos, b.batch))",
    wrt="pos",
)
def schnet():
    from torch_geometric.nn.models import SchNet

    class Neighbours(torch.nn.Module):
        """For the library's own, which wants a compiled extension."""

        def forward(self, pos, batch):
            near = (torch.cdist(pos, pos) < 10) & (batch[:, None] == batch)
            pairs = (near & ~torch.eye(len(pos), dtype=torch.bool)).nonzero().T
            return pairs, (pos[pairs[0]] - pos[pairs[1]]).norm(dim=-1)

    model = SchNet(
        hidden_channels=16,
        num_filters=8,
        num_interactions=1,
        num_gaussians=10,
        interaction_graph=Neighbours(),
    )

    def slope(model, batch):
        pos = batch.pos.detach().requires_grad_()
        energy = model(batch.z, pos, batch.batch)
        return torch.autograd.grad(energy.sum(), pos, create_graph=True)[0]

    return Given(
        model.double(),
        **graphs(),
        readout=["lin2.weight", "lin2.bias"],
        output=lambda m, b: m(b.z, b.pos, b.batch),
        slope=slope,
    )
