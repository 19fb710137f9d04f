// The module vllm._kv_core.
#include "records.h"
#include "sha256.h"

namespace kv_core {

PyObject* invariant_error = nullptr;

bool wrong_count(const char* name, Py_ssize_t count, Py_ssize_t wanted) {
  if (count == wanted) return false;
  PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", name, wanted, count);
  return true;
}

namespace {

PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

PyObject* select_portable_sha256(PyObject*, PyObject* portable) {
  const int wanted = PyObject_IsTrue(portable);
  if (wanted < 0) return nullptr;
  use_portable_sha256(wanted != 0);
  Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    {"select_portable_sha256", select_portable_sha256, METH_O, nullptr},
    {"make_blocks", fast(make_blocks), METH_FASTCALL, nullptr},
    {"bind_take", fast(bind_take), METH_FASTCALL, nullptr},
    {"touch", fast(touch), METH_FASTCALL, nullptr},
    {"bind_find_cached", fast(bind_find_cached), METH_FASTCALL, nullptr},
    {"lacking", fast(lacking), METH_FASTCALL, nullptr},
    {"pack_block_ids", fast(pack_block_ids), METH_FASTCALL, nullptr},
    {"pack_token_counts", fast(pack_token_counts), METH_FASTCALL, nullptr},
    {"count_before", fast(count_before), METH_FASTCALL, nullptr},
    {"release", fast(release), METH_FASTCALL, nullptr},
    {"hash_chain", fast(hash_chain), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "vllm._kv_core", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

bool find_invariant_error() {
  PyObject* checks = PyImport_ImportModule("vllm.utils.checks");
  if (checks == nullptr) return false;
  invariant_error = PyObject_GetAttrString(checks, "InvariantError");
  Py_DECREF(checks);
  return invariant_error != nullptr;
}

}  // namespace

}  // namespace kv_core

PyMODINIT_FUNC PyInit__kv_core() {
  PyObject* module = PyModule_Create(&kv_core::definition);
  if (module == nullptr) return nullptr;
  if (kv_core::find_invariant_error() && kv_core::add_block_type(module) && kv_core::add_queue_type(module) &&
      kv_core::add_tally_type(module) && kv_core::add_index_type(module) && kv_core::add_search_type(module)) {
    return module;
  }
  Py_DECREF(module);
  return nullptr;
}
