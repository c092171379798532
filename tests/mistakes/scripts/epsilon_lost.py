import torch

torch.manual_seed(0)
model = torch.nn.Linear(8, 1).half()
optimizer = torch.optim.Adam(model.parameters(), lr=0.25)
for _ in range(3):
    model(torch.ones(4, 8, dtype=torch.float16)).float().mean().backward()
    optimizer.step()  # epsilon-lost
    optimizer.zero_grad()
