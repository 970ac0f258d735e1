// What activates the branches of a network, with its derivative, on vectors.

#pragma once

#include "vectors.h"

namespace relinear {

// h Phi(h), Phi the normal distribution's: 1 - Phi by Abramowitz and Stegun's 7.1.26, good to 1.5e-7.
inline Floats gelu(Floats h, Floats& derivative) {
  const Floats distance = (h > 0.f ? h : -h) * 0.70710678f;
  const Floats t = 1.f / (1.f + 0.3275911f * distance);
  const Floats bell = exponential(-distance * distance);
  Floats tail = t * 1.061405429f - 1.453152027f;
  tail = tail * t + 1.421413741f;
  tail = tail * t - 0.284496736f;
  tail = 0.5f * (tail * t + 0.254829592f) * t * bell;
  const Floats below = h > 0.f ? 1.f - tail : tail;
  derivative = below + h * bell * 0.39894228f;
  return h * below;
}

inline Floats silu(Floats h, Floats& derivative) {
  const Floats open = sigmoid(h);
  derivative = open * (1.f + h * (1.f - open));
  return h * open;
}

inline Floats elu(Floats h, Floats& derivative) {
  const Floats power = exponential(h > 0.f ? Floats{} : h);
  derivative = h > 0.f ? Floats{} + 1.f : power;
  return h > 0.f ? h : power - 1.f;
}

// A branch's PReLU times its factor in the mixture, and the sums that the gradients of both are.
struct Line {
  Floats above, below, positive = {}, negative = {};
  float slope, share;

  Line(float slope, float share)
      : above(Floats{} + share), below(Floats{} + share * slope), slope(slope), share(share) {}

  Floats value(Floats h) const { return h * derivative(h); }
  Floats derivative(Floats h) const { return h > 0.f ? above : below; }
  void add(Floats grad, Floats h) {
    const Floats product = grad * h;
    positive += h > 0.f ? product : Floats{};
    negative += h > 0.f ? Floats{} : product;
  }
  void finish(Floats& to_slope, Floats& to_share) const {
    to_slope += share * negative;
    to_share += positive + slope * negative;
  }
};

// The same of a function that learns nothing.
template <Floats (*function)(Floats, Floats&)>
struct Curve {
  Floats share, total = {};

  Curve(float, float share) : share(Floats{} + share) {}

  Floats value(Floats h) const {
    Floats unused;
    return share * function(h, unused);
  }
  Floats derivative(Floats h) const {
    Floats found;
    function(h, found);
    return share * found;
  }
  void add(Floats grad, Floats h) {
    Floats unused;
    total += grad * function(h, unused);
  }
  void finish(Floats&, Floats& to_share) const { to_share += total; }
};

// in the order of ``calls.ACTIVATIONS``
enum class Activation : int64_t { kLine, kGelu, kSilu, kElu };

// body of a ``Line`` or a ``Curve``
template <class Body>
void with_activation(Activation which, float slope, float share, const Body& body) {
  switch (which) {
    case Activation::kLine:
      return body(Line(slope, share));
    case Activation::kGelu:
      return body(Curve<gelu>(slope, share));
    case Activation::kSilu:
      return body(Curve<silu>(slope, share));
    case Activation::kElu:
      return body(Curve<elu>(slope, share));
  }
}

}  // namespace relinear
