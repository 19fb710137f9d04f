// Registers the CUDA kernels under the operators that csrc/bindings.cpp defines. Uses only what libtorch_cpu exports, so
// the library also loads where torch has no CUDA.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "kv_copy.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

int64_t item_size(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
    case ScalarType::Int:
      return 4;
    case ScalarType::Double:
    case ScalarType::Long:
      return 8;
    case ScalarType::BFloat16:
    case ScalarType::Half:
    case ScalarType::Short:
      return 2;
    default:
      return 1;
  }
}

void copy_blocks(Tensor target, const Tensor& source, const Tensor& target_blocks, const Tensor& source_blocks) {
  STD_TORCH_CHECK(target.dim() == 2 && source.dim() == 2 && target.scalar_type() == source.scalar_type() &&
                      target.size(1) == source.size(1) && target.stride(1) == 1 && source.stride(1) == 1,
                  "vllm_native: source and target blocks must be alike");
  STD_TORCH_CHECK(target_blocks.scalar_type() == ScalarType::Long && source_blocks.scalar_type() == ScalarType::Long &&
                      target_blocks.numel() == source_blocks.numel() && target_blocks.is_contiguous() &&
                      source_blocks.is_contiguous(),
                  "vllm_native: block ids must be int64, as many targets as sources");
  const int64_t bytes = item_size(target);
  // One side may be pinned host memory, which the device sees under the same address.
  const Tensor& on_device = target.is_cuda() ? target : source;
  const auto stream = torch::stable::accelerator::getCurrentStream(on_device.get_device_index());
  const int error = vllm_cuda_copy_blocks(
      target.data_ptr(), source.data_ptr(), static_cast<const int64_t*>(target_blocks.data_ptr()),
      static_cast<const int64_t*>(source_blocks.data_ptr()), target_blocks.numel(), target.size(1) * bytes,
      target.stride(0) * bytes, source.stride(0) * bytes, stream.nativeHandle());
  STD_TORCH_CHECK(error == 0, "vllm_native: copy_blocks failed with CUDA error ", error);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(vllm_native, CUDA, m) { m.impl("copy_blocks", TORCH_BOX(&copy_blocks)); }
