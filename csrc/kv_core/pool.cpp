// The loops of the pool: allocate with eviction, touch, release.
#include "scout.h"

#include <cstring>

namespace kv_core {

PyTypeObject* tally_type = nullptr;

namespace {

void dealloc_tally(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(reinterpret_cast<PyObject*>(type));
}

PyMemberDef tally_members[] = {
    {"evicted", T_PYSSIZET, offsetof(Tally, evicted), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot tally_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(PyType_GenericNew)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc_tally)},
    {Py_tp_members, tally_members},
    {0, nullptr},
};

PyType_Spec tally_spec = {"vllm._kv_core.Tally", sizeof(Tally), 0, Py_TPFLAGS_DEFAULT, tally_slots};

// Removes `block` from the entry of its key in the index: a block, or a dict of blocks by id where several hold the
// same content. Another block's entry stays.
bool forget(Index* index, Block* block) {
  const uint64_t place = find_entry(index, block->hash, hash_of(block->hash));
  if (place == kNowhere) return true;
  PyObject* entry = index->entries[place].value;
  if (entry == as_object(block)) {
    erase_entry(index, place);
    return true;
  }
  if (!PyDict_Check(entry)) return true;
  PyObject* id = PyLong_FromLong(block->id);
  if (id == nullptr) return false;
  const int found = PyDict_Contains(entry, id);
  const bool ok = found >= 0 && (found == 0 || PyDict_DelItem(entry, id) == 0);
  Py_DECREF(id);
  if (!ok) return false;
  const Py_ssize_t left = PyDict_Size(entry);
  if (left == 0) erase_entry(index, place);
  if (left != 1) return true;
  Py_ssize_t position = 0;
  PyObject *key = nullptr, *last = nullptr;
  PyDict_Next(entry, &position, &key, &last);
  assign(index->entries[place].value, last);
  return true;
}

// What `block.owner` is for this pool; borrowed.
bool is_owned(const Block* block, PyObject* pool, PyObject* weak) {
  return block->owner != nullptr && (block->owner == weak || block->owner == pool);
}

PyObject* weak_reference(PyObject* pool) {
  PyObject* weak = PyWeakref_NewRef(pool, nullptr);
  if (weak == nullptr) PyErr_Clear();
  return weak;
}

// Blocks are mostly taken one at a time: what one of the next times needs is fetched meanwhile.
void expect_next_takes(const Queue* queue, const Index* index) {
  constexpr int kPlaces = 3, kTexts = 6;  // takes from now
  const Block* block = queue->head->next;
  for (int i = 1; i <= kTexts && block != nullptr && block != queue->tail; ++i) {
    if (i == kPlaces) expect_place(index, block);
    if (i == kTexts) expect_text(block);
    block = block->next;
  }
  __builtin_prefetch(block);
}

// What `bind_take` binds; strong references.
struct Bound {
  PyObject ob_base;
  Queue* queue;
  Index* index;
  Tally* tally;
  PyObject* further_keys;
};

PyTypeObject* bound_type = nullptr;

void dealloc_bound(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  Bound* bound = reinterpret_cast<Bound*>(self);
  Py_XDECREF(reinterpret_cast<PyObject*>(bound->queue));
  Py_XDECREF(reinterpret_cast<PyObject*>(bound->index));
  Py_XDECREF(reinterpret_cast<PyObject*>(bound->tally));
  Py_XDECREF(bound->further_keys);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(reinterpret_cast<PyObject*>(type));
}

PyType_Slot bound_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(dealloc_bound)}, {0, nullptr}};

PyType_Spec bound_spec = {"vllm._kv_core.Bound", sizeof(Bound), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                          bound_slots};

// The function that `bind_take` returns.
PyObject* take(PyObject* self, PyObject* count) {
  const Bound* bound = reinterpret_cast<Bound*>(self);
  if (PyDict_Size(bound->further_keys) != 0) Py_RETURN_NONE;
  const Py_ssize_t number = PyLong_AsSsize_t(count);
  if (number == -1 && PyErr_Occurred()) return nullptr;
  Queue* queue = bound->queue;
  Index* index = bound->index;
  Tally* tally = bound->tally;
  if (number < 0 || number > queue->size) {
    return PyErr_Format(PyExc_ValueError, "Cannot get %zd free blocks from the pool, %zd are free", number, queue->size);
  }
  const auto empty = [index, tally](Block* block) {
    block->references = 1;
    if (block->hash == nullptr) return true;
    if (!forget(index, block)) return false;
    tally->evicted += 1;
    Py_CLEAR(block->hash);
    block->num_tokens = kNoTokens;
    return true;
  };
  PyObject* taken = nullptr;
  if (number < kAhead) {
    taken = pop_front(queue, number, empty);
  } else {
    Scout scout(queue, index);
    taken = pop_front(queue, number, [&scout, &empty](Block* block) {
      scout.step();
      return empty(block);
    });
  }
  if (taken != nullptr) expect_next_takes(queue, index);
  return taken;
}

// A column of 32-bit numbers, one of each block, as bytes.
template <typename Number>
PyObject* pack(PyObject* blocks, Number number) {
  static_assert(sizeof(number(static_cast<const Block*>(nullptr))) == sizeof(uint32_t));
  Items items(blocks);
  const Py_ssize_t count = items.ok() ? items.size() : 0;
  PyObject* bytes = items.ok() ? PyBytes_FromStringAndSize(nullptr, count * Py_ssize_t(sizeof(uint32_t))) : nullptr;
  char* place = bytes == nullptr ? nullptr : PyBytes_AsString(bytes);
  for (Py_ssize_t i = 0; bytes != nullptr && i < count; ++i, place += sizeof(uint32_t)) {
    const Block* block = as_block(items[i]);
    if (block == nullptr) {
      Py_CLEAR(bytes);
      break;
    }
    const auto value = number(block);
    std::memcpy(place, &value, sizeof(value));
  }
  return bytes;
}

PyMethodDef take_definition = {"take", take, METH_O, nullptr};

}  // namespace

bool add_tally_type(PyObject* module) {
  tally_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&tally_spec));
  bound_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&bound_spec));
  return bound_type != nullptr && tally_type != nullptr &&
         PyModule_AddObjectRef(module, "Tally", reinterpret_cast<PyObject*>(tally_type)) == 0;
}

// bind_take(queue, index, tally, further_keys) -> function of a count, which returns a list: the front of the queue, each block
// with one reference and without its hash, which leaves the index and is counted. None, and no change, while `further_keys` is
// not empty.
PyObject* bind_take(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (wrong_count("bind_take", count, 4)) return nullptr;
  if (!PyObject_TypeCheck(args[0], queue_type) || Py_TYPE(args[2]) != tally_type || !PyDict_Check(args[3])) {
    PyErr_SetString(PyExc_TypeError, "bind_take needs a native queue, index and tally, and a dict");
    return nullptr;
  }
  if (as_index(args[1]) == nullptr) return nullptr;
  PyObject* object = PyType_GenericAlloc(bound_type, 0);
  if (object == nullptr) return nullptr;
  Bound* bound = reinterpret_cast<Bound*>(object);
  bound->queue = held<Queue>(args[0]);
  bound->index = held<Index>(args[1]);
  bound->tally = held<Tally>(args[2]);
  bound->further_keys = held<PyObject>(args[3]);
  PyObject* function = PyCFunction_New(&take_definition, object);
  Py_DECREF(object);
  return function;
}

// touch(pool, queue, blocks) -> None, or a list of blocks of other pools: one more reference for each of the pool's own,
// which leaves the queue if nobody held it. Null blocks are skipped.
PyObject* touch(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (wrong_count("touch", count, 3)) return nullptr;
  if (!PyObject_TypeCheck(args[1], queue_type)) {
    PyErr_SetString(PyExc_TypeError, "touch needs a native queue");
    return nullptr;
  }
  Items items(args[2]);
  if (!items.ok()) return nullptr;
  PyObject* weak = weak_reference(args[0]);
  PyObject* foreign = nullptr;
  bool ok = true;
  for (Py_ssize_t i = 0, n = items.size(); ok && i < n; ++i) {
    Block* block = as_block(items[i]);
    ok = block != nullptr;
    if (!ok || block->is_null) continue;
    if (is_owned(block, args[0], weak)) {
      if (block->references == 0) ok = unlink(reinterpret_cast<Queue*>(args[1]), block);
      if (ok) block->references += 1;
      continue;
    }
    if (foreign == nullptr) foreign = PyList_New(0);
    ok = foreign != nullptr && PyList_Append(foreign, as_object(block)) == 0;
  }
  Py_XDECREF(weak);
  if (!ok) {
    Py_XDECREF(foreign);
    return nullptr;
  }
  if (foreign != nullptr) return foreign;
  Py_RETURN_NONE;
}

// pack_token_counts(blocks) -> bytes of 32-bit numbers: how many tokens their hashes cover, or kNoTokens.
PyObject* pack_token_counts(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (wrong_count("pack_token_counts", count, 1)) return nullptr;
  return pack(args[0], [](const Block* block) { return block->num_tokens; });
}

// pack_block_ids(blocks) -> bytes of signed 32-bit numbers: their ids.
PyObject* pack_block_ids(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (wrong_count("pack_block_ids", count, 1)) return nullptr;
  return pack(args[0], [](const Block* block) { return block->id; });
}

// release(pool, blocks, cached, uncached) -> None, or a list of blocks of other pools: one reference less for each of the pool's
// own; those nobody holds now are appended to `cached` if they have a hash, else to `uncached`. Null blocks are skipped.
PyObject* release(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (wrong_count("release", count, 4)) return nullptr;
  Items items(args[1]);
  if (!items.ok()) return nullptr;
  PyObject* weak = weak_reference(args[0]);
  PyObject* foreign = nullptr;
  bool ok = true;
  for (Py_ssize_t i = 0, n = items.size(); ok && i < n; ++i) {
    Block* block = as_block(items[i]);
    ok = block != nullptr;
    if (!ok || block->is_null) continue;
    if (!is_owned(block, args[0], weak)) {
      if (foreign == nullptr) foreign = PyList_New(0);
      ok = foreign != nullptr && PyList_Append(foreign, as_object(block)) == 0;
    } else if (block->references <= 0) {
      PyErr_Format(invariant_error, "block %d is freed but nobody holds it", block->id);
      ok = false;
    } else if (--block->references == 0) {
      ok = PyList_Append(block->hash != nullptr ? args[2] : args[3], as_object(block)) == 0;
    }
  }
  Py_XDECREF(weak);
  if (!ok) {
    Py_XDECREF(foreign);
    return nullptr;
  }
  if (foreign != nullptr) return foreign;
  Py_RETURN_NONE;
}

}  // namespace kv_core
