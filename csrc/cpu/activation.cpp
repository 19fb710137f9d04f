// Gated SiLU with optional clamps.
#include "simd.h"

namespace vllm_native {
namespace VLLM_ISA {

static inline Vec silu_mul(Vec gate, Vec up, bool has_limit, Vec limit) {
  if (has_limit) {
    gate = vec_min(limit, gate);
    up = vec_max(vec_set(0) - limit, vec_min(limit, up));
  }
  return gate / (vec_set(1.0f) + vec_exp(vec_set(0) - gate)) * up;
}

template <typename T>
static void silu_row(const SiluMulArgs& a, int64_t row) {
  const T* gate = static_cast<const T*>(a.gate_up) + row * 2 * a.size;
  const T* up = gate + a.size;
  T* out = static_cast<T*>(a.out) + row * a.size;
  const Vec limit = vec_set(a.limit);
  const int64_t whole = a.size - a.size % Vec::kLanes;
  for (int64_t i = 0; i < whole; i += Vec::kLanes) {
    vec_store(out + i, silu_mul(vec_load(gate + i), vec_load(up + i), a.has_limit, limit));
  }
  const int64_t rest = a.size - whole;
  if (rest) {
    const Vec value = silu_mul(vec_load_part(gate + whole, rest), vec_load_part(up + whole, rest), a.has_limit, limit);
    vec_store_part(out + whole, value, rest);
  }
}

void silu_and_mul(const SiluMulArgs& a, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto type) {
    for (int64_t row = begin; row < end; ++row) silu_row<decltype(type)>(a, row);
  });
}

}  // namespace VLLM_ISA
}  // namespace vllm_native
