// Some channels of all requests: their states are summed against the weights and moved on by one input.

#include "cpu.h"

#include "rounding.h"
#include "vector.h"

namespace kvgroups::KVGROUPS_ISA {

namespace {

struct Scratch {
  float *taps, *bias, *inputs, *states;  // (K, channels), (channels,), (channels,), (channels, K)
};

// totals[c] = the products of channel c's last K - 1 inputs and its new one with its weights. TAPS is K, or 0 for any.
template <int TAPS>
INLINE void weighted_sum(const float* states, const Scratch& scratch, int64_t count, int64_t width, float* totals) {
  const int64_t K = TAPS ? TAPS : width;
  for (int64_t channel = 0; channel < count; ++channel) {
    float total = scratch.inputs[channel] * scratch.taps[(K - 1) * NUM_CHANNELS + channel];
    for (int64_t tap = 0; tap < K - 1; ++tap)
      total += states[channel * K + tap + 1] * scratch.taps[tap * NUM_CHANNELS + channel];
    totals[channel] = total;
  }
}

// Every channel's inputs one place on: the states of all channels lie in one piece, so they move as one.
template <typename Element>
INLINE void shift(Element* states, const Operand& x, int64_t request, int64_t first, int64_t count, int64_t width) {
  memmove(states, states + 1, (count * width - 1) * sizeof(Element));
  const Element* from = (const Element*)x.data + request * x.strides[1] + first * x.strides[2];
  for (int64_t channel = 0; channel < count; ++channel)
    states[channel * width + width - 1] = from[channel * x.strides[2]];
}

// Round as a convolution of that element type does, activate, and write.
template <typename Element>
INLINE void finish(const float* totals, const Scratch& scratch, int64_t count, bool has_silu, Element* output) {
  for (int64_t channel = 0; channel < count; channel += WIDTH) {
    Vector result = rounded<Element>(load(totals + channel) + load(scratch.bias + channel));
    if (has_silu) result = silu(result);
    from_floats(result, output + channel, count - channel < WIDTH ? (int)(count - channel) : WIDTH);
  }
}

template <typename Element, int TAPS>
void convolve(const ConvolutionCall& call, int64_t first, int64_t count, const Scratch& scratch) {
  float totals[NUM_CHANNELS];
  for (int64_t request = 0; request < call.num_requests; ++request) {
    int64_t slot = call.slots[request];
    if (slot == 0) continue;  // padding
    Element* states = (Element*)call.states + slot * call.slot_stride + first * call.width;
    read(call.x, 0, request, first, count, scratch.inputs);
    read_run(states, 1, count * call.width, scratch.states);
    weighted_sum<TAPS>(scratch.states, scratch, count, call.width, totals);
    finish(totals, scratch, count, call.has_silu, (Element*)call.output + request * call.num_channels + first);
    shift(states, call.x, request, first, count, call.width);
  }
}

template <typename Element>
void convolve_any_width(const ConvolutionCall& call, int64_t first, int64_t count, const Scratch& scratch) {
  auto run = call.width == 4   ? convolve<Element, 4>
             : call.width == 3 ? convolve<Element, 3>
             : call.width == 2 ? convolve<Element, 2>
                               : convolve<Element, 0>;
  run(call, first, count, scratch);
}

}  // namespace

void convolve_channels(const ConvolutionCall& call, int64_t first, float* memory) {
  int64_t count = call.num_channels - first < NUM_CHANNELS ? call.num_channels - first : NUM_CHANNELS;
  float *taps = memory, *bias = taps + call.width * NUM_CHANNELS, *inputs = bias + NUM_CHANNELS;
  Scratch scratch{taps, bias, inputs, inputs + NUM_CHANNELS};
  Operand by_tap = call.weight;  // the channels last
  by_tap.strides[1] = call.weight.strides[2], by_tap.strides[2] = call.weight.strides[1];
  for (int64_t tap = 0; tap < call.width; ++tap) read(by_tap, 0, tap, first, count, taps + tap * NUM_CHANNELS);
  for (int64_t channel = 0; channel < NUM_CHANNELS; ++channel) bias[channel] = -0.0f;  // adds nothing
  if (call.bias.data) read(call.bias, 0, 0, first, count, bias);
  auto run = call.x.element_type == FLOAT32    ? convolve_any_width<Float32>
             : call.x.element_type == BFLOAT16 ? convolve_any_width<BFloat16>
                                               : convolve_any_width<Float16>;
  run(call, first, count, scratch);
}

}  // namespace kvgroups::KVGROUPS_ISA
