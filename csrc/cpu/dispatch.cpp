// Chooses the kernels for this processor, once; a caller may choose another set for tests.
#include <atomic>
#include <cstring>

#include "../ops.h"

namespace vllm_native {

namespace scalar {
extern const Kernels kTable;
}

#ifdef VLLM_X86
namespace avx2 {
extern const Kernels kTable;
}
namespace avx512 {
extern const Kernels kTable;
}

static bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
static bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

static const Kernels* find(const char* name) {
  const bool any = std::strcmp(name, "auto") == 0;
#ifdef VLLM_X86
  __builtin_cpu_init();
  if ((any || std::strcmp(name, "avx512") == 0) && has_avx512()) return &avx512::kTable;
  if ((any || std::strcmp(name, "avx2") == 0) && has_avx2()) return &avx2::kTable;
#endif
  return any || std::strcmp(name, "scalar") == 0 ? &scalar::kTable : nullptr;
}

static std::atomic<const Kernels*> chosen{nullptr};

const Kernels& active_kernels() {
  const Kernels* kernels = chosen.load(std::memory_order_acquire);
  if (kernels == nullptr) {
    kernels = find("auto");
    chosen.store(kernels, std::memory_order_release);
  }
  return *kernels;
}

bool select_isa(const char* name) {
  const Kernels* kernels = find(name);
  if (kernels == nullptr) return false;
  chosen.store(kernels, std::memory_order_release);
  return true;
}

}  // namespace vllm_native
