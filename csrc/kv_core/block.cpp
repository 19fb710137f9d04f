// The record of one block.
#include "records.h"

namespace kv_core {

PyTypeObject* block_type = nullptr;

namespace {

Block* self_of(PyObject* self) { return reinterpret_cast<Block*>(self); }

PyObject* or_none(PyObject* object) {
  PyObject* result = object == nullptr ? Py_None : object;
  Py_INCREF(result);
  return result;
}

PyObject* reference_to(PyObject* pool) {
  PyObject* weak = PyWeakref_NewRef(pool, nullptr);
  if (weak != nullptr) return weak;
  PyErr_Clear();
  Py_INCREF(pool);
  return pool;
}

PyObject* get_hash(PyObject* self, void*) { return or_none(self_of(self)->hash); }

int set_hash(PyObject* self, PyObject* value, void*) {
  if (value != nullptr && value != Py_None && !PyBytes_Check(value)) {
    PyErr_SetString(PyExc_TypeError, "block_hash must be bytes or None");
    return -1;
  }
  assign(self_of(self)->hash, value == Py_None ? nullptr : value);
  return 0;
}

PyObject* get_num_tokens(PyObject* self, void*) {
  const uint32_t tokens = self_of(self)->num_tokens;
  return tokens == kNoTokens ? or_none(nullptr) : PyLong_FromUnsignedLong(tokens);
}

int set_num_tokens(PyObject* self, PyObject* value, void*) {
  uint32_t tokens = kNoTokens;
  if (value != nullptr && value != Py_None) {
    const unsigned long number = PyLong_AsUnsignedLong(value);
    if (number == static_cast<unsigned long>(-1) && PyErr_Occurred()) return -1;
    if (number >= kNoTokens) {
      PyErr_Format(PyExc_OverflowError, "block_hash_num_tokens is %lu, at most %lu", number, kNoTokens - 1ul);
      return -1;
    }
    tokens = static_cast<uint32_t>(number);
  }
  self_of(self)->num_tokens = tokens;
  return 0;
}

PyObject* get_pool(PyObject* self, void*) {
  PyObject* owner = self_of(self)->owner;
  return or_none(owner != nullptr && PyWeakref_Check(owner) ? PyWeakref_GetObject(owner) : owner);
}

int set_pool(PyObject* self, PyObject* value, void*) {
  PyObject* owner = value == nullptr || value == Py_None ? nullptr : reference_to(value);
  PyObject* old = self_of(self)->owner;
  self_of(self)->owner = owner;
  Py_XDECREF(old);
  return 0;
}

template <Block* Block::*link>
PyObject* get_link(PyObject* self, void*) {
  return or_none(as_object(self_of(self)->*link));
}

template <Block* Block::*link>
int set_link(PyObject* self, PyObject* value, void*) {
  Block* block = value == nullptr || value == Py_None ? nullptr : as_block(value);
  if (block == nullptr && PyErr_Occurred()) return -1;
  assign(self_of(self)->*link, block);
  return 0;
}

int init(PyObject* self, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"block_id", "ref_cnt", "pool", "is_null", nullptr};
  int id = 0, references = 0, is_null = 0;
  PyObject* pool = Py_None;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "i|i$Op", const_cast<char**>(names), &id, &references, &pool, &is_null)) {
    return -1;
  }
  Block* block = self_of(self);
  block->id = id;
  block->references = references;
  block->num_tokens = kNoTokens;
  block->is_null = static_cast<char>(is_null);
  assign(block->hash, static_cast<PyObject*>(nullptr));
  assign(block->previous, static_cast<Block*>(nullptr));
  assign(block->next, static_cast<Block*>(nullptr));
  return set_pool(self, pool, nullptr);
}

void dealloc(PyObject* self) {
  Block* block = self_of(self);
  PyTypeObject* type = Py_TYPE(self);
  Py_XDECREF(block->hash);
  Py_XDECREF(as_object(block->previous));
  Py_XDECREF(as_object(block->next));
  Py_XDECREF(block->owner);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(reinterpret_cast<PyObject*>(type));
}

PyObject* set_block_hash(PyObject* self, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"block_hash", "num_tokens", nullptr};
  PyObject *hash = nullptr, *num_tokens = Py_None;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|O", const_cast<char**>(names), &hash, &num_tokens)) return nullptr;
  if (self_of(self)->hash != nullptr) {
    return PyErr_Format(invariant_error, "block %d already has a hash", self_of(self)->id);
  }
  if (set_num_tokens(self, num_tokens, nullptr) != 0 || set_hash(self, hash, nullptr) != 0) return nullptr;
  Py_RETURN_NONE;
}

PyObject* reset_hash(PyObject* self, PyObject*) {
  Py_CLEAR(self_of(self)->hash);
  self_of(self)->num_tokens = kNoTokens;
  Py_RETURN_NONE;
}

PyObject* represent(PyObject* self) {
  const Block* block = self_of(self);
  PyObject* previous = block->previous == nullptr ? or_none(nullptr) : PyLong_FromLong(block->previous->id);
  PyObject* next = block->next == nullptr ? or_none(nullptr) : PyLong_FromLong(block->next->id);
  PyObject* text = nullptr;
  if (previous != nullptr && next != nullptr) {
    text = PyUnicode_FromFormat(
        "KVCacheBlock(block_id=%d, ref_cnt=%d, block_hash=%R, prev_free_block=%S, next_free_block=%S)", block->id,
        block->references, block->hash == nullptr ? Py_None : block->hash, previous, next);
  }
  Py_XDECREF(previous);
  Py_XDECREF(next);
  return text;
}

PyMemberDef members[] = {
    {"block_id", T_INT, offsetof(Block, id), 0, nullptr},
    {"ref_cnt", T_INT, offsetof(Block, references), 0, nullptr},
    {"is_null", T_BOOL, offsetof(Block, is_null), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyGetSetDef accessors[] = {
    {"block_hash", get_hash, set_hash, nullptr, nullptr},
    {"_block_hash", get_hash, set_hash, nullptr, nullptr},
    {"block_hash_num_tokens", get_num_tokens, set_num_tokens, nullptr, nullptr},
    {"pool", get_pool, set_pool, nullptr, nullptr},
    {"prev_free_block", get_link<&Block::previous>, set_link<&Block::previous>, nullptr, nullptr},
    {"next_free_block", get_link<&Block::next>, set_link<&Block::next>, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyMethodDef methods[] = {
    {"set_block_hash", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(set_block_hash)), METH_VARARGS | METH_KEYWORDS,
     "set_block_hash($self, block_hash, num_tokens=None)\n--\n\nGive the block its primary key; it must not have one."},
    {"reset_hash", reset_hash, METH_NOARGS, "reset_hash($self)\n--\n\nForget the primary key."},
    {nullptr, nullptr, 0, nullptr},
};

const char kDoc[] =
    "KVCacheBlock(block_id, ref_cnt=0, *, pool=None, is_null=False)\n--\n\n"
    "A slot of the KV pool; vllm/v1/core/kv_cache_block.py tells what its attributes mean.";

PyType_Slot slots[] = {
    {Py_tp_doc, const_cast<char*>(kDoc)},
    {Py_tp_repr, reinterpret_cast<void*>(represent)},
    {Py_tp_methods, methods},
    {Py_tp_init, reinterpret_cast<void*>(init)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_new, reinterpret_cast<void*>(PyType_GenericNew)},
    {Py_tp_members, members},
    {Py_tp_getset, accessors},
    {0, nullptr},
};

// No subclasses: Python would have the garbage collector track them, for 16 bytes more each.
PyType_Spec spec = {"vllm.v1.core.kv_cache_block.KVCacheBlock", sizeof(Block), 0, Py_TPFLAGS_DEFAULT, slots};

}  // namespace

bool add_block_type(PyObject* module) {
  block_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return block_type != nullptr && PyModule_AddObjectRef(module, "KVCacheBlock", reinterpret_cast<PyObject*>(block_type)) == 0;
}

// make_blocks(count, pool): blocks 0 … count-1, faster than calling the type for each.
PyObject* make_blocks(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (wrong_count("make_blocks", count, 2)) return nullptr;
  const long number = PyLong_AsLong(args[0]);
  if (number < 0 || number > INT32_MAX) {
    if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "%ld blocks are out of range", number);
    return nullptr;
  }
  PyObject* owner = args[1] == Py_None ? nullptr : reference_to(args[1]);
  PyObject* blocks = PyList_New(number);
  for (long i = 0; blocks != nullptr && i < number; ++i) {
    PyObject* object = PyType_GenericAlloc(block_type, 0);
    if (object == nullptr) {
      Py_CLEAR(blocks);
      break;
    }
    Block* block = self_of(object);
    block->id = static_cast<int32_t>(i);
    block->num_tokens = kNoTokens;
    Py_XINCREF(owner);
    block->owner = owner;
    PyList_SetItem(blocks, i, object);
  }
  Py_XDECREF(owner);
  return blocks;
}

}  // namespace kv_core
