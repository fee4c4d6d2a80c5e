// Sets of small numbers of a fixed size.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "graph.hpp"

namespace lowtide {

using Word = std::uint64_t;
constexpr Index kWordBits = 64;

// A set of numbers below 64 times `Words`.
template <int Words>
class Bits {
public:
    Bits() = default;
    explicit Bits(Indices numbers) {
        for (Index number : numbers) add(number);
    }

    void add(Index number) { words_[number / kWordBits] |= Word{1} << number % kWordBits; }
    void drop(const Bits& other) {
        for (std::size_t i = 0; i < words_.size(); ++i) words_[i] &= ~other.words_[i];
    }
    bool empty() const { return *this == Bits(); }
    void drop(Index number) { words_[number / kWordBits] &= ~(Word{1} << number % kWordBits); }
    bool has(Index number) const { return words_[number / kWordBits] >> number % kWordBits & 1; }
    bool within(const Bits& other) const {
        for (std::size_t i = 0; i < words_.size(); ++i) {
            if (words_[i] & ~other.words_[i]) return false;
        }
        return true;
    }
    bool meets(const Bits& other) const {
        for (std::size_t i = 0; i < words_.size(); ++i) {
            if (words_[i] & other.words_[i]) return true;
        }
        return false;
    }
    Bits& operator|=(const Bits& other) {
        for (std::size_t i = 0; i < words_.size(); ++i) words_[i] |= other.words_[i];
        return *this;
    }
    Bits& operator&=(const Bits& other) {
        for (std::size_t i = 0; i < words_.size(); ++i) words_[i] &= other.words_[i];
        return *this;
    }
    Number count() const {
        Number total = 0;
        for (Word word : words_) total += std::popcount(word);
        return total;
    }
    template <class Visit>
    void each(Visit visit) const {
        for (std::size_t i = 0; i < words_.size(); ++i) {
            for (Word word = words_[i]; word != 0; word &= word - 1) {
                visit(static_cast<Index>(i * kWordBits + std::countr_zero(word)));
            }
        }
    }
    Word hash() const {
        Word total = 0;
        for (Word word : words_) total = (total ^ word) * 0x9E3779B97F4A7C15 + (total >> 29);
        return total;
    }
    bool operator==(const Bits&) const = default;

private:
    std::array<Word, Words> words_{};
};

}  // namespace lowtide
