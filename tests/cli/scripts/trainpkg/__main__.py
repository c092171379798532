from .config import TrainConfig
from .train import fit

if __name__ == "__main__":
    fit(TrainConfig.from_args())
