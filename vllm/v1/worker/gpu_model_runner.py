"""The model runner on an NVIDIA GPU: device placement, and replay of captured decodes. Layer: L6."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.attention.backend import StepMeta
from vllm.v1.worker.cuda_graphs import DecodeGraphs, GraphSafeModel, capture_cuda_graph, graph_sizes
from vllm.v1.worker.model_runner import ModelRunner

logger = init_logger(__name__)


class GPUModelRunner(ModelRunner):
    """A `ModelRunner` for CUDA. Tensors that a model makes by itself are made on the GPU."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.graphs: DecodeGraphs | None = None

    def load_model(self) -> None:
        with self.device:
            super().load_model()

    def run_model(self, input_ids: Tensor, meta: StepMeta) -> Tensor:
        with self.device:
            hidden = None if self.graphs is None else self.graphs.run(input_ids, meta)
            return super().run_model(input_ids, meta) if hidden is None else hidden

    def capture_graphs(self) -> None:
        """Capture decode steps where the model allows it; otherwise every step runs eagerly."""
        model_config = self.vllm_config.model_config
        assert model_config is not None
        if model_config.enforce_eager:
            return
        if not isinstance(self.model, GraphSafeModel) or not self.model.graph_safe_decode:
            logger.info("The model does not declare graph-safe decodes; every step runs eagerly")
            return
        graphs = DecodeGraphs(super().run_model, capture_cuda_graph)
        with self.device:
            for size in graph_sizes(self.max_num_reqs):
                graphs.capture(*self.dummy_decode(size))
        self.graphs = graphs
