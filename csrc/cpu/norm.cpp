// RMSNorm over rows, optionally adding to the residual stream first. Statistics in fp32.
#include "simd.h"

namespace vllm_native {
namespace VLLM_ISA {

template <typename T>
static void rms_norm_row(const RmsNormArgs& a, int64_t row) {
  const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
  const T* weight = static_cast<const T*>(a.weight);
  T* out = static_cast<T*>(a.out) + row * a.size;
  const int64_t whole = a.size - a.size % Vec::kLanes;
  const int64_t rest = a.size - whole;
  if (a.residual != nullptr) {
    T* residual = static_cast<T*>(a.residual) + row * a.size;
    for (int64_t i = 0; i < whole; i += Vec::kLanes) vec_store(residual + i, vec_load(residual + i) + vec_load(x + i));
    if (rest) {
      const Vec sum = vec_load_part(residual + whole, rest) + vec_load_part(x + whole, rest);
      vec_store_part(residual + whole, sum, rest);
    }
    x = residual;
  }
  Vec squares = vec_set(0);
  for (int64_t i = 0; i < whole; i += Vec::kLanes) {
    const Vec value = vec_load(x + i);
    squares = vec_fma(value, value, squares);
  }
  if (rest) {
    const Vec value = vec_load_part(x + whole, rest);
    squares = vec_fma(value, value, squares);
  }
  const Vec factor = vec_set(1.0f / sqrtf(vec_sum(squares) / float(a.size) + a.eps));
  for (int64_t i = 0; i < whole; i += Vec::kLanes) {
    vec_store(out + i, vec_load(x + i) * factor * vec_load(weight + i));
  }
  if (rest) {
    vec_store_part(out + whole, vec_load_part(x + whole, rest) * factor * vec_load_part(weight + whole, rest), rest);
  }
}

void rms_norm(const RmsNormArgs& a, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto type) {
    for (int64_t row = begin; row < end; ++row) rms_norm_row<decltype(type)>(a, row);
  });
}

}  // namespace VLLM_ISA
}  // namespace vllm_native
