// A second device for tests: memory of its own that is counted, and the CPU's kernels.
//
// It behaves as an accelerator does where that matters to a program: a tensor has to be moved to it,
// operations refuse tensors that were left behind on the CPU, memory ends at a limit. There are two of
// them, as in a machine with two cards. Who needs the counts of several processes together names a file
// in SECOND_DEVICE_LEDGER; see `Ledger`.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace {

constexpr auto kSecond = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kCount = 2;
thread_local c10::DeviceIndex current = 0;

// ---- memory

struct Ledger {  // Of one device, in bytes; a limit of 0 is none.
  std::atomic<int64_t> live, peak, limit;
};

Ledger* open_ledgers() {
  const char* path = std::getenv("SECOND_DEVICE_LEDGER");
  const size_t size = kCount * sizeof(Ledger);
  int file = path ? open(path, O_RDWR | O_CREAT, 0600) : -1;
  if (file >= 0 && lseek(file, 0, SEEK_END) < off_t(size) && ftruncate(file, size)) std::abort();
  int flags = file >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
  void* place = mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, file, 0);
  if (place == MAP_FAILED) std::abort();
  return static_cast<Ledger*>(place);
}

Ledger* ledgers() {
  static Ledger* opened = open_ledgers();
  return opened;
}

struct Block {  // Lies before the bytes that are handed out, which stay aligned.
  size_t size;
  c10::DeviceIndex device;
};
constexpr size_t kBefore = 64;

void* take(size_t size, c10::DeviceIndex device) {
  Ledger& ledger = ledgers()[device];
  int64_t live = ledger.live += size;
  int64_t limit = ledger.limit;
  if (limit && live > limit) {
    ledger.live -= size;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "second device ", int(device), " is out of memory: ", live,
                     " bytes would be live, and it has ", limit);
  }
  int64_t peak = ledger.peak;
  while (live > peak && !ledger.peak.compare_exchange_weak(peak, live)) {}
  auto* block = static_cast<Block*>(std::aligned_alloc(kBefore, kBefore + (size + kBefore - 1) / kBefore * kBefore));
  *block = {size, device};
  return reinterpret_cast<char*>(block) + kBefore;
}

void give_back(void* data) {
  if (!data) return;
  auto* block = reinterpret_cast<Block*>(static_cast<char*>(data) - kBefore);
  ledgers()[block->device].live -= block->size;
  std::free(block);
}

struct Memory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = size ? take(size, current) : nullptr;
    return {data, data, &give_back, c10::Device(kSecond, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) {
      (*bytes)[0].current = ledgers()[device].live;
      (*bytes)[0].peak = ledgers()[device].peak;
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { ledgers()[device].peak = ledgers()[device].live.load(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    int64_t limit = ledgers()[device].limit;
    size_t total = limit ? limit : size_t(1) << 32;
    return {total - ledgers()[device].live, total};
  }
};
Memory memory;
REGISTER_ALLOCATOR(kSecond, &memory);

// ---- the device

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSecond; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kSecond, current}; }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return kCount; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kCount; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return std::exchange(current, device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  // What is drawn here comes from the CPU's generator, so that the numbers are the CPU's.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::globalContext().defaultGenerator(at::kCPU);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto data = memory.allocate(size);
    if (size_t kept = std::min(size, storage.nbytes())) std::memcpy(data.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

// ---- operations

at::Tensor on_host(const at::Tensor& x) {  // A CPU tensor over the same memory.
  if (!x.defined() || !x.is_privateuseone()) return x;
  auto* data = static_cast<char*>(x.storage().mutable_data()) + x.storage_offset() * x.element_size();
  return at::from_blob(data, x.sizes(), x.strides(), [](void*) {}, x.options().device(at::kCPU));
}

c10::DeviceGuard placed(std::optional<at::Device> device) {
  return c10::DeviceGuard(device && device->has_index() ? *device : at::Device(kSecond, current));
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  auto guard = placed(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(type),
                                   format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> type,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  auto guard = placed(device);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(type));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  on_host(to).copy_(on_host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar item(const at::Tensor& x) { return on_host(x).item(); }

at::Tensor view(const at::Tensor& x, c10::SymIntArrayRef size) {
  return at::native::view(x, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor as_strided(const at::Tensor& x, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  auto start = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(x, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}

at::Tensor reshape_alias(const at::Tensor& x, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(x, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor unfold(const at::Tensor& x, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(x, dimension, size, step);
}

const at::Tensor& resize(const at::Tensor& x, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(x, C10_AS_INTARRAYREF_SLOW(size), format);
}

void refuse_left_behind(const char* name, at::TensorList tensors) {
  bool here = false, there = false;
  for (const auto& x : tensors) {
    if (!x.defined()) continue;
    here |= x.is_privateuseone();
    there |= x.is_cpu() && x.dim() > 0;  // A single number may come from the CPU, as elsewhere.
  }
  TORCH_CHECK(!here || !there, name, " got tensors of the second device and of the CPU; one was left behind");
}

at::Tensor convolution(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                       bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  at::Tensor shift = bias.value_or(at::Tensor());
  refuse_left_behind("convolution", {x, weight, shift});
  return at::convolution_symint(on_host(x), on_host(weight), on_host(shift), stride, padding, dilation, transposed,
                                output_padding, groups)
      .to(x.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> wanted) {
  refuse_left_behind("convolution_backward", {gradient, x, weight});
  c10::SymInt channels = transposed ? weight.sym_size(1) * groups : weight.sym_size(0);
  auto found = at::convolution_backward_symint(on_host(gradient), on_host(x), on_host(weight),
                                               at::OptionalSymIntArrayRef({channels}), stride, padding, dilation,
                                               transposed, output_padding, groups, wanted);
  auto moved = [&](const at::Tensor& one) { return one.defined() ? one.to(x.device()) : one; };
  return {moved(std::get<0>(found)), moved(std::get<1>(found)), moved(std::get<2>(found))};
}

at::Tensor mse_loss(const at::Tensor& x, const at::Tensor& y, int64_t reduction) {
  refuse_left_behind("mse_loss", {x, y});  // Torch's own way to it resizes a result, and warns of that.
  return at::mse_loss(on_host(x), on_host(y), reduction).to(x.device());
}

// All other operations: the CPU's, on the same memory. Their results are copied, as new ones are the CPU's.
void compute(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const auto& schema = operation.schema();
  const size_t count = schema.arguments().size(), start = stack->size() - count;
  std::vector<at::Tensor> seen;
  std::vector<c10::IValue> given(stack->begin() + start, stack->end());
  std::optional<at::Device> device;
  auto take = [&](const at::Tensor& x, bool written) {
    if (x.defined() && x.is_privateuseone()) device = x.device();
    // Also a single number has to be here if something is written to it.
    seen.push_back(written && x.defined() && x.is_cpu() ? x.reshape({-1}) : x);
    // A result without a size yet gets one from the kernel.
    return written && x.defined() && x.numel() == 0 ? at::empty({0}, x.options().device(at::kCPU)) : on_host(x);
  };
  for (size_t number = 0; number < count; ++number) {
    auto& value = (*stack)[start + number];
    const auto* alias = schema.arguments()[number].alias_info();
    const bool written = alias && alias->isWrite();
    if (value.isTensor()) {
      value = take(value.toTensor(), written);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& one : value.toTensorVector()) list.push_back(take(one, written));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& one : value.toOptionalTensorVector()) {
        list.push_back(one ? std::optional<at::Tensor>(take(*one, written)) : std::nullopt);
      }
      value = list;
    } else if (value.isDevice()) {
      if (value.toDevice().type() == kSecond) device = value.toDevice();
      value = at::Device(at::kCPU);
    }
  }
  refuse_left_behind(schema.name().c_str(), seen);
  operation.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  const auto& returns = schema.returns();
  const size_t first = stack->size() - returns.size();
  auto home = [&](const at::Tensor& x) { return x.defined() && device ? x.to(*device) : x; };
  for (size_t number = 0; number < returns.size(); ++number) {
    auto& value = (*stack)[first + number];
    const auto* alias = returns[number].alias_info();
    if (alias && alias->isWrite()) {
      for (size_t argument = 0; argument < count; ++argument) {
        const auto* other = schema.arguments()[argument].alias_info();
        if (other && *other == *alias) {
          if (value.isTensor() && value.toTensor().sizes() != given[argument].toTensor().sizes()) {
            copy_from_and_resize(value.toTensor(), given[argument].toTensor());
          }
          value = given[argument];
        }
      }
    } else if (value.isTensor()) {
      value = home(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& one : value.toTensorVector()) list.push_back(home(one));
      value = list;
    }
  }
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &item);
  library.impl("view", &view);
  library.impl("as_strided", &as_strided);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("unfold", &unfold);
  library.impl("resize_", &resize);
  library.impl("mse_loss", &mse_loss);
  // Kernels of its own, as accelerators have: torch would put these together from others.
  for (const char* name : {"native_layer_norm", "native_group_norm", "_safe_softmax", "embedding"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&compute>());
  }
  library.impl("convolution_overrideable", &convolution);
  library.impl("convolution_backward_overrideable", &convolution_backward);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>());
}

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace

extern "C" void set_limit(int64_t device, int64_t bytes) { ledgers()[device].limit = bytes; }
