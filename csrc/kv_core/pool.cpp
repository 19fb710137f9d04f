// The loops of the pool: allocate with eviction, touch, release.
#include "records.h"

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
bool forget(PyObject* index, Block* block) {
  PyObject* entry = PyDict_GetItemWithError(index, block->hash);
  if (entry == as_object(block)) return PyDict_DelItem(index, block->hash) == 0;
  if (entry == nullptr || !PyDict_Check(entry)) return !PyErr_Occurred();
  PyObject* id = PyLong_FromLong(block->id);
  if (id == nullptr) return false;
  const int found = PyDict_Contains(entry, id);
  bool ok = found >= 0 && (found == 0 || PyDict_DelItem(entry, id) == 0);
  Py_DECREF(id);
  if (!ok) return false;
  const Py_ssize_t left = PyDict_Size(entry);
  if (left == 0) return PyDict_DelItem(index, block->hash) == 0;
  if (left > 1) return true;
  Py_ssize_t position = 0;
  PyObject *key = nullptr, *last = nullptr;
  PyDict_Next(entry, &position, &key, &last);
  Py_INCREF(last);
  ok = PyDict_SetItem(index, block->hash, last) == 0;
  Py_DECREF(last);
  return ok;
}

// What `block.owner` is for this pool; borrowed.
bool is_owned(const Block* block, PyObject* pool, PyObject* weak) {
  return block->owner != nullptr && (block->owner == weak || block->owner == pool);
}

bool ends_with(PyObject* hash, const Items& suffixes) {
  const char* bytes = PyBytes_AsString(hash);
  const Py_ssize_t size = PyBytes_Size(hash);
  for (Py_ssize_t i = 0, n = suffixes.size(); i < n; ++i) {
    const Py_ssize_t length = PyBytes_Size(suffixes[i]);
    if (length < 0) return false;
    if (length <= size && std::memcmp(bytes + size - length, PyBytes_AsString(suffixes[i]), length) == 0) return true;
  }
  return false;
}

// A list of `value(block)` for each of the blocks.
template <typename Value>
PyObject* column(PyObject* blocks, Value value) {
  Items items(blocks);
  PyObject* values = items.ok() ? PyList_New(items.size()) : nullptr;
  for (Py_ssize_t i = 0; values != nullptr && i < items.size(); ++i) {
    Block* block = as_block(items[i]);
    PyObject* made = block == nullptr ? nullptr : value(block);
    if (made == nullptr) {
      Py_CLEAR(values);
    } else {
      PyList_SetItem(values, i, made);
    }
  }
  return values;
}

PyObject* weak_reference(PyObject* pool) {
  PyObject* weak = PyWeakref_NewRef(pool, nullptr);
  if (weak == nullptr) PyErr_Clear();
  return weak;
}

}  // namespace

bool add_tally_type(PyObject* module) {
  tally_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&tally_spec));
  return tally_type != nullptr && PyModule_AddObjectRef(module, "Tally", reinterpret_cast<PyObject*>(tally_type)) == 0;
}

// take(queue, index, tally, count) -> list: the front of the queue, each block with one reference and without its hash,
// which leaves the index and is counted.
PyObject* take(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (wrong_count("take", count, 4)) return nullptr;
  if (!PyObject_TypeCheck(args[0], queue_type) || !PyDict_Check(args[1]) || Py_TYPE(args[2]) != tally_type) {
    PyErr_SetString(PyExc_TypeError, "take needs a native queue, a dict and a native tally");
    return nullptr;
  }
  const Py_ssize_t number = PyLong_AsSsize_t(args[3]);
  if (number == -1 && PyErr_Occurred()) return nullptr;
  PyObject* taken = pop_front(reinterpret_cast<Queue*>(args[0]), number);
  for (Py_ssize_t i = 0; taken != nullptr && i < number; ++i) {
    Block* block = reinterpret_cast<Block*>(PyList_GetItem(taken, i));
    block->references = 1;
    if (block->hash == nullptr) continue;
    if (!forget(args[1], block)) {
      Py_CLEAR(taken);
      break;
    }
    reinterpret_cast<Tally*>(args[2])->evicted += 1;
    Py_CLEAR(block->hash);
    block->num_tokens = kNoTokens;
  }
  return taken;
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

// look_ahead(queue, depth, index) -> (whether the index lacks the hash of one of the first `depth` blocks, the last of them
// or None); it stops at the first that is lacking.
PyObject* look_ahead(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (wrong_count("look_ahead", count, 3)) return nullptr;
  if (!PyObject_TypeCheck(args[0], queue_type) || !PyDict_Check(args[2])) {
    PyErr_SetString(PyExc_TypeError, "look_ahead needs a native queue and a dict");
    return nullptr;
  }
  const Py_ssize_t depth = PyLong_AsSsize_t(args[1]);
  if (depth == -1 && PyErr_Occurred()) return nullptr;
  const Queue* queue = reinterpret_cast<Queue*>(args[0]);
  Block* last = nullptr;
  int found = 1;
  Block* block = queue->head->next;
  for (Py_ssize_t i = 0; i < depth && found == 1 && block != nullptr && block != queue->tail; ++i, block = block->next) {
    last = block;
    if (block->hash != nullptr) found = PyDict_Contains(args[2], block->hash);
  }
  if (found < 0) return nullptr;
  return PyTuple_Pack(2, found == 0 ? Py_True : Py_False, last == nullptr ? Py_None : as_object(last));
}

// find_cached(queue, depth, suffixes, unwanted) -> (blocks, hashes, last): of the first `depth` blocks those whose hash ends
// with one of the suffixes and is not in the set `unwanted`, and the last block looked at or None.
PyObject* find_cached(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (wrong_count("find_cached", count, 4)) return nullptr;
  if (!PyObject_TypeCheck(args[0], queue_type) || !PyAnySet_Check(args[3])) {
    PyErr_SetString(PyExc_TypeError, "find_cached needs a native queue and a set");
    return nullptr;
  }
  const Py_ssize_t depth = PyLong_AsSsize_t(args[1]);
  if (depth == -1 && PyErr_Occurred()) return nullptr;
  Items suffixes(args[2]);
  if (!suffixes.ok()) return nullptr;
  const bool all_wanted = PySet_Size(args[3]) == 0;
  const Queue* queue = reinterpret_cast<Queue*>(args[0]);
  Block *last = nullptr, *block = queue->head->next;
  PyObject *blocks = PyList_New(0), *hashes = PyList_New(0);
  bool ok = blocks != nullptr && hashes != nullptr;
  for (Py_ssize_t i = 0; ok && i < depth && block != nullptr && block != queue->tail; ++i, block = block->next) {
    last = block;
    if (block->hash == nullptr || !ends_with(block->hash, suffixes)) continue;
    const int unwanted = all_wanted ? 0 : PySet_Contains(args[3], block->hash);
    if (unwanted == 0) ok = PyList_Append(blocks, as_object(block)) == 0 && PyList_Append(hashes, block->hash) == 0;
    if (unwanted < 0) ok = false;
  }
  PyObject* found = nullptr;
  if (ok && !PyErr_Occurred()) found = PyTuple_Pack(3, blocks, hashes, last == nullptr ? Py_None : as_object(last));
  Py_XDECREF(blocks);
  Py_XDECREF(hashes);
  return found;
}

// lacking(index, hashes) -> list: those of the hashes that the index has no entry for, in order.
PyObject* lacking(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (wrong_count("lacking", count, 2)) return nullptr;
  if (!PyDict_Check(args[0])) {
    PyErr_SetString(PyExc_TypeError, "lacking needs a dict");
    return nullptr;
  }
  Items hashes(args[1]);
  if (!hashes.ok()) return nullptr;
  PyObject* absent = PyList_New(0);
  bool ok = absent != nullptr;
  for (Py_ssize_t i = 0, n = hashes.size(); ok && i < n; ++i) {
    const int found = PyDict_Contains(args[0], hashes[i]);
    ok = found > 0 || (found == 0 && PyList_Append(absent, hashes[i]) == 0);
  }
  if (!ok) Py_CLEAR(absent);
  return absent;
}

// block_ids(blocks) -> list of their ids.
PyObject* block_ids(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (wrong_count("block_ids", count, 1)) return nullptr;
  return column(args[0], [](const Block* block) { return PyLong_FromLong(block->id); });
}

// token_counts(blocks) -> list of how many tokens their hashes cover, or None.
PyObject* token_counts(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (wrong_count("token_counts", count, 1)) return nullptr;
  return column(args[0], [](const Block* block) {
    if (block->num_tokens != kNoTokens) return PyLong_FromUnsignedLong(block->num_tokens);
    Py_INCREF(Py_None);
    return Py_None;
  });
}

// count_before(queue, limit, hashes) -> int: how many blocks, `limit` at most, are in front of the first whose hash is in the
// set `hashes`.
PyObject* count_before(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (wrong_count("count_before", count, 3)) return nullptr;
  if (!PyObject_TypeCheck(args[0], queue_type) || !PyAnySet_Check(args[2])) {
    PyErr_SetString(PyExc_TypeError, "count_before needs a native queue and a set");
    return nullptr;
  }
  const Py_ssize_t limit = PyLong_AsSsize_t(args[1]);
  if (limit == -1 && PyErr_Occurred()) return nullptr;
  const Queue* queue = reinterpret_cast<Queue*>(args[0]);
  Py_ssize_t before = 0;
  for (Block* block = queue->head->next; before < limit && block != nullptr && block != queue->tail; block = block->next) {
    const int found = block->hash == nullptr ? 0 : PySet_Contains(args[2], block->hash);
    if (found < 0) return nullptr;
    if (found != 0) break;
    before += 1;
  }
  return PyLong_FromSsize_t(before);
}

// release(pool, blocks, idle) -> None, or a list of blocks of other pools: one reference less for each of the pool's own;
// those nobody holds now are appended to `idle`. Null blocks are skipped.
PyObject* release(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (wrong_count("release", count, 3)) return nullptr;
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
      ok = PyList_Append(args[2], as_object(block)) == 0;
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
