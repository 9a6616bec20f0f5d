// Memory for vectors.
#pragma once

#include <memory>
#include <new>

// Memory whose vectors do not straddle cache lines. Grows only, without keeping what it holds.
class Floats {
  public:
    void fit(long size) {
        if (size <= size_) return;
        memory_.reset(static_cast<float *>(::operator new(size * sizeof(float), std::align_val_t{64})));
        size_ = size;
    }
    float &operator[](long at) const { return memory_.get()[at]; }
    float *data() const { return memory_.get(); }

  private:
    struct Free {
        void operator()(float *memory) const { ::operator delete(memory, std::align_val_t{64}); }
    };
    std::unique_ptr<float, Free> memory_;
    long size_ = 0;
};
