// lamella.kvtier._C: file I/O, checksums and key hashing. Each has a Python twin that says the same, only slower.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <unordered_map>
#include <utility>
#include <vector>

#include "checksum/crc32c.h"
#include "io/aligned_file.h"
#include "io/engine.h"
#include "keys/block_hash.h"
#include "keys/sha256.h"

namespace py = pybind11;
using lamella::kvtier::AlignedFile;
using lamella::kvtier::Done;
using lamella::kvtier::IoEngine;
using lamella::kvtier::Op;

namespace {

[[noreturn]] void raise_os_error(int error, const std::string& what) {
  errno = error;
  PyErr_SetFromErrnoWithFilename(PyExc_OSError, what.c_str());
  throw py::error_already_set();
}

// A contiguous buffer of any object, held for as long as this lives. Moved and destroyed under the interpreter's lock.
class Held {
 public:
  Held(const py::handle& object, bool writable) {
    if (PyObject_GetBuffer(object.ptr(), &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0) {
      throw py::error_already_set();
    }
    held_ = true;
  }
  Held(Held&& other) noexcept : view_(other.view_), held_(std::exchange(other.held_, false)) {}
  Held& operator=(Held&&) = delete;
  ~Held() {
    if (held_) PyBuffer_Release(&view_);
  }
  void* data() const { return view_.buf; }
  std::size_t size() const { return static_cast<std::size_t>(view_.len); }

 private:
  Py_buffer view_{};
  bool held_ = false;
};

// An engine and the Python buffers its ops read and write.
class Engine {
 public:
  Engine(const std::string& kind, unsigned depth, unsigned num_threads) {
    if (kind == "auto" || kind == "io_uring") engine_ = lamella::kvtier::make_uring_engine(depth, why_);
    if (kind == "io_uring" && !engine_) raise_os_error(ENOSYS, why_);
    if (!engine_) engine_ = lamella::kvtier::make_thread_engine(num_threads);
  }
  ~Engine() { close(); }

  void submit(const py::sequence& ops) {
    std::vector<Op> native;
    native.reserve(ops.size());
    for (const py::handle& item : ops) {
      const auto op = py::reinterpret_borrow<py::sequence>(item);
      const bool write = op[2].cast<bool>();
      Op made{op[0].cast<std::uint64_t>(), op[1].cast<int>(), write, op[3].cast<std::uint64_t>(), {}};
      std::vector<Held> held;
      for (const py::handle& buffer : op[4].cast<py::sequence>()) {
        held.emplace_back(buffer, !write);
        if (held.back().size() > 0) made.parts.push_back(iovec{held.back().data(), held.back().size()});
      }
      buffers_.emplace(made.id, std::move(held));
      native.push_back(std::move(made));
    }
    const py::gil_scoped_release unlocked;
    engine().submit(std::move(native));
  }

  py::list wait(std::size_t min_done, double timeout_s) {
    std::vector<Done> done;
    {
      const py::gil_scoped_release unlocked;
      done = engine().wait(min_done, timeout_s);
    }
    py::list result;
    for (const Done& op : done) {
      buffers_.erase(op.id);
      result.append(py::make_tuple(op.id, op.result));
    }
    return result;
  }

  void wake() { engine().wake(); }
  std::string name() const { return engine_ ? engine_->name() : "closed"; }
  const std::string& why() const { return why_; }

  void close() {
    if (engine_) {
      const py::gil_scoped_release unlocked;
      engine_.reset();
    }
    buffers_.clear();
  }

 private:
  IoEngine& engine() const {
    if (!engine_) throw std::runtime_error("the engine is closed");
    return *engine_;
  }

  std::unique_ptr<IoEngine> engine_;
  std::unordered_map<std::uint64_t, std::vector<Held>> buffers_;
  std::string why_;
};

std::uint32_t checksum(const py::handle& data, std::uint32_t crc, bool table) {
  const Held held(data, false);
  const py::gil_scoped_release unlocked;
  return table ? lamella::kvtier::crc32c_table(held.data(), held.size(), crc)
               : lamella::kvtier::crc32c(held.data(), held.size(), crc);
}

// Ids [first, last) of a list, tuple, sequence, or of a contiguous buffer of unsigned 32-bit items, which is read in
// place. Raises struct.error like the reference does.
class Ids {
 public:
  Ids(const py::handle& ids, Py_ssize_t first, Py_ssize_t last) {
    if (PyObject_CheckBuffer(ids.ptr()) != 0) {
      if (PyObject_GetBuffer(ids.ptr(), &view_, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) == 0) {
        held_ = true;
        const char* format = view_.format == nullptr ? "B" : view_.format;
        const bool unsigned32 = std::strcmp(format, "I") == 0 || std::strcmp(format, "L") == 0;
        if (unsigned32 && view_.itemsize == 4 && view_.ndim == 1 && view_.len >= last * 4) {
          data_ = static_cast<const std::uint32_t*>(view_.buf) + first;
          return;
        }
      } else {
        PyErr_Clear();
      }
    }
    copy(ids, first, last);
    data_ = values_.data();
  }
  ~Ids() {
    if (held_) PyBuffer_Release(&view_);
  }
  Ids(const Ids&) = delete;
  Ids& operator=(const Ids&) = delete;
  const std::uint32_t* data() const { return data_; }

 private:
  void copy(const py::handle& ids, Py_ssize_t first, Py_ssize_t last) {
    values_.resize(static_cast<std::size_t>(last - first));
    const bool fast = PyList_Check(ids.ptr()) || PyTuple_Check(ids.ptr());
    const py::object part = fast ? py::reinterpret_borrow<py::object>(ids)
                                 : py::reinterpret_steal<py::object>(PySequence_GetSlice(ids.ptr(), first, last));
    if (!part) throw py::error_already_set();
    const py::object items =
        py::reinterpret_steal<py::object>(PySequence_Fast(part.ptr(), "token ids must be a sequence"));
    if (!items) throw py::error_already_set();
    const Py_ssize_t skip = fast ? first : 0;
    for (Py_ssize_t i = 0; i < last - first; ++i) {
      // asked for each time: an id's __index__ may shorten the list
      if (PySequence_Fast_GET_SIZE(items.ptr()) <= skip + i) throw py::index_error("fewer ids than asked for");
      PyObject* item = PySequence_Fast_GET_ITEM(items.ptr(), skip + i);
      values_[static_cast<std::size_t>(i)] = PyLong_CheckExact(item) ? read(item) : read_index(item);
    }
  }
  static std::uint32_t read_index(PyObject* item) {
    const py::object index = py::reinterpret_steal<py::object>(PyNumber_Index(item));
    if (!index) throw py::error_already_set();
    return read(index.ptr());
  }
  static std::uint32_t read(PyObject* number) {
    const unsigned long long id = PyLong_AsUnsignedLongLong(number);
    const bool overflow = id == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr;
    if (overflow || id > 0xFFFFFFFFULL) {
      PyErr_Clear();
      PyErr_SetString(py::module_::import("struct").attr("error").ptr(), "token ids must lie in [0, 2**32)");
      throw py::error_already_set();
    }
    return static_cast<std::uint32_t>(id);
  }

  Py_buffer view_{};
  bool held_ = false;
  const std::uint32_t* data_ = nullptr;
  std::vector<std::uint32_t> values_;
};

// Appends the keys of num_blocks blocks from ids[first] on to the list `keys`. portable: by plain C++ instructions.
void chain(const py::bytes& parent, const py::handle& ids, Py_ssize_t first, Py_ssize_t block_size,
           Py_ssize_t num_blocks, py::list keys, bool portable) {
  using lamella::kvtier::kKeyBytes;
  char* start = nullptr;
  Py_ssize_t length = 0;
  if (PyBytes_AsStringAndSize(parent.ptr(), &start, &length) != 0) throw py::error_already_set();
  if (length != static_cast<Py_ssize_t>(kKeyBytes) || block_size < 1 || num_blocks < 0 || first < 0) {
    throw py::value_error("a parent has 32 bytes, a block at least one token");
  }
  const Ids values(ids, first, first + block_size * num_blocks);
  const lamella::kvtier::Sha256& sha = portable ? lamella::kvtier::portable_sha256() : lamella::kvtier::sha256();
  constexpr std::size_t kPortion = 2048;  // what stays in the first caches until it is copied into objects
  std::vector<std::uint8_t> out(std::min<std::size_t>(kPortion, static_cast<std::size_t>(num_blocks)) * kKeyBytes);
  std::uint8_t above[kKeyBytes];
  std::memcpy(above, start, kKeyBytes);
  const auto size = static_cast<std::size_t>(block_size), total = static_cast<std::size_t>(num_blocks);
  for (std::size_t done = 0; done < total;) {
    const std::size_t count = std::min(kPortion, total - done);
    {
      const py::gil_scoped_release unlocked;
      lamella::kvtier::chain_keys(sha, above, values.data() + done * size, size, count, out.data());
    }
    for (std::size_t at = 0; at < count * kKeyBytes; at += kKeyBytes) {
      PyObject* key = PyBytes_FromStringAndSize(reinterpret_cast<const char*>(out.data() + at), kKeyBytes);
      const int failed = key == nullptr ? -1 : PyList_Append(keys.ptr(), key);
      Py_XDECREF(key);
      if (failed != 0) throw py::error_already_set();
    }
    std::memcpy(above, out.data() + (count - 1) * kKeyBytes, kKeyBytes);
    done += count;
  }
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.attr("build_id") = LAMELLA_BUILD_ID;
  m.attr("crc32c_kind") = lamella::kvtier::crc32c_kind();
  m.attr("sha256_kind") = lamella::kvtier::sha256().kind;

  m.def("crc32c", [](const py::object& data, std::uint32_t crc) { return checksum(data, crc, false); },
        py::arg("data"), py::arg("crc") = 0);
  m.def("crc32c_table", [](const py::object& data, std::uint32_t crc) { return checksum(data, crc, true); },
        py::arg("data"), py::arg("crc") = 0);
  m.def("chain_keys", &chain, py::arg("parent"), py::arg("ids"), py::arg("first"), py::arg("block_size"),
        py::arg("num_blocks"), py::arg("keys"), py::arg("portable") = false);
  m.def("address", [](const py::object& buffer) {
    const Held held(buffer, false);
    return reinterpret_cast<std::uintptr_t>(held.data());
  }, py::arg("buffer"));

  py::class_<AlignedFile>(m, "AlignedFile")
      .def(py::init([](int dir_fd, const std::string& name, bool write, bool create, bool direct) {
             try {
               const py::gil_scoped_release unlocked;
               return std::make_unique<AlignedFile>(dir_fd, name, write, create, direct);
             } catch (const std::system_error& error) {
               raise_os_error(error.code().value(), name);
             }
           }),
           py::arg("dir_fd"), py::arg("name"), py::arg("write"), py::arg("create"), py::arg("direct"))
      .def_property_readonly("fd", &AlignedFile::fd)
      .def_property_readonly("direct", &AlignedFile::direct)
      .def_property_readonly("alignment", &AlignedFile::alignment)
      .def("preallocate", &AlignedFile::preallocate, py::arg("bytes"), py::call_guard<py::gil_scoped_release>())
      .def("truncate", &AlignedFile::truncate, py::arg("bytes"), py::call_guard<py::gil_scoped_release>())
      .def("drop_cache", &AlignedFile::drop_cache, py::call_guard<py::gil_scoped_release>())
      .def("close", &AlignedFile::close, py::call_guard<py::gil_scoped_release>());

  py::class_<Engine>(m, "IoEngine")
      .def(py::init<const std::string&, unsigned, unsigned>(), py::arg("kind"), py::arg("depth"),
           py::arg("num_threads"))
      .def("submit", &Engine::submit, py::arg("ops"))
      .def("wait", &Engine::wait, py::arg("min_done"), py::arg("timeout_s"))
      .def("wake", &Engine::wake)
      .def("close", &Engine::close)
      .def_property_readonly("name", &Engine::name)
      .def_property_readonly("why", &Engine::why);
}
