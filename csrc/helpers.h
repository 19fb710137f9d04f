// Threads that help their owner with one piece of work at a time, parked in between. No torch, no Python.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>

namespace vllm_native {

// For one caller at a time: make it `thread_local`. Helpers are threads of their own, for torch's belong to a forward that
// runs meanwhile; they have the priority that their owner had when they were started. The owner never waits for a helper
// that has not begun: where no core is free it does all the work itself.
class Helpers {
 public:
  Helpers() : shared_(std::make_shared<Shared>()) {}
  Helpers(const Helpers&) = delete;
  Helpers& operator=(const Helpers&) = delete;
  ~Helpers() {
    // Not joined: the end of a thread waits for no other. They hold what they look at.
    std::lock_guard<std::mutex> lock(shared_->mutex);
    shared_->closed = true;
    shared_->wake.notify_all();
  }

  // Calls work() here and on up to `count` helpers; the calls share the work out among themselves, and one that comes late
  // finds nothing left. Returns when none runs any more. work() must not throw.
  template <typename Work>
  void run(int64_t count, const Work& work) {
    if (count <= 0) {
      work();
      return;
    }
    start(count);
    {
      std::lock_guard<std::mutex> lock(shared_->mutex);
      shared_->work = &work;
      shared_->call = [](const void* given) { (*static_cast<const Work*>(given))(); };
      shared_->wanted = std::min(count, started_);
    }
    for (int64_t i = 0; i < count; ++i) shared_->wake.notify_one();
    work();
    std::unique_lock<std::mutex> lock(shared_->mutex);
    shared_->wanted = 0;
    shared_->left.wait(lock, [&] { return shared_->running == 0; });
  }

 private:
  struct Shared {
    std::mutex mutex;
    std::condition_variable wake, left;
    const void* work = nullptr;
    void (*call)(const void*) = nullptr;
    int64_t wanted = 0, running = 0;
    bool closed = false;
  };

  static void help(const std::shared_ptr<Shared>& shared) {
    std::unique_lock<std::mutex> lock(shared->mutex);
    for (;;) {
      shared->wake.wait(lock, [&] { return shared->wanted > 0 || shared->closed; });
      if (shared->closed) return;
      --shared->wanted;
      ++shared->running;
      const void* work = shared->work;
      const auto call = shared->call;
      lock.unlock();
      call(work);
      lock.lock();
      if (--shared->running == 0) shared->left.notify_one();
    }
  }

  void start(int64_t count) {
    try {
      for (; started_ < count; ++started_) std::thread(help, shared_).detach();
    } catch (const std::exception&) {
      // The system has no more: those that are there do it.
    }
  }

  std::shared_ptr<Shared> shared_;
  int64_t started_ = 0;
};

}  // namespace vllm_native
