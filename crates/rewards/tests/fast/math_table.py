"""Makes math_table.tsv: what the Python package math_verify says of pairs of answers.

    pip install math-verify==0.9.0
    python crates/rewards/tests/fast/math_table.py > crates/rewards/tests/fast/math_table.tsv

Each row is a reference answer, an answer, and 1 or 0. References and right answers are written as they are in GSM8K and MATH; near misses
are the mistakes that a policy makes. Both go to math_verify between dollars, which is how it knows LaTeX.
"""

from math_verify import parse, verify

# Per line: the reference, then answers to compare with it.
GROUPS = r"""
72 | 72 | 72.0 | 72.00 | 71 | -72 | 720 | \boxed{72} | 072 | x=72 | 72\% | +72
18 | \$18 | 18 \text{ dollars} | 18.5 | 81 | \text{eighteen}
1080 | 1,080 | 1{,}080 | 1,\!080 | 1080.0 | 108 | 1,08 | 10800
70000 | \$70,000 | 70,000.00 | 7 \times 10^4 | 7e4 | 70,001
1234567 | 1,234,567 | 1234,567 | 1,234,568
0.5 | \frac{1}{2} | \frac12 | \dfrac{1}{2} | \tfrac 12 | .5 | 0.50 | 50\% | 5 | 1/2 | 2/4 | -0.5
\frac{1}{2} | 0.5 | 0.49 | \frac{2}{4} | \frac{1}{3} | 1/2 | \frac{-1}{-2} | 2^{-1} | \sqrt{\frac14}
\frac{1}{3} | 0.333333 | 0.3333333333 | 0.33 | 0.3333 | \frac{2}{6} | 1/3 | 3
\frac{2}{3} | 0.666667 | 0.67 | \frac{4}{6} | \frac{3}{2}
\frac{3}{4} | 0.75 | \frac{-3}{-4} | \frac{6}{8} | 75\% | \frac{4}{3} | 3/4
-\frac{3}{4} | \frac{-3}{4} | \frac{3}{-4} | -0.75 | -.75 | \frac{3}{4}
\frac{7}{3} | 2\frac{1}{3} | 2 \frac13 | 7/3 | 2.333333 | \frac{3}{7}
3\frac{1}{2} | 3.5 | \frac{7}{2} | \frac{3}{2} | 3
-2\frac{1}{4} | -2.25 | -\frac{9}{4} | -1.75
\frac{11}{36} | 11/36 | \frac{22}{72} | 0.305556 | \frac{36}{11}
\frac{1}{1000} | 0.001 | 10^{-3} | 1 \times 10^{-3} | 0.01
50\% | 50 | 0.5 | 50 \% | 5\% | \frac{1}{2}
12.5\% | 12.5 | 0.125 | \frac{1}{8} | 12
10\sqrt{2} | \sqrt{200} | 10 \sqrt 2 | 14.142136 | \sqrt{20} | 10\sqrt{3} | 2\sqrt{10}
\sqrt{2} | 2^{1/2} | 2^{\frac{1}{2}} | \sqrt 2 | \sqrt2 | 1.414214 | 1.41 | 2
\frac{\sqrt{3}}{3} | \frac{1}{\sqrt{3}} | \frac{\sqrt3}{3} | \sqrt{\frac13} | \frac{3}{\sqrt3} | 0.577350
\frac{1+\sqrt{5}}{2} | \frac{\sqrt{5}+1}{2} | \frac12 + \frac{\sqrt5}{2} | 1.618034 | \frac{1-\sqrt{5}}{2}
2-\sqrt{3} | -\sqrt{3}+2 | \frac{1}{2+\sqrt{3}} | 2+\sqrt{3} | \sqrt{3}-2
\sqrt[3]{4} | 4^{1/3} | \sqrt[3]{5} | \sqrt{4} | 2^{2/3}
\pi | 3.141593 | 3.14 | \pi r | 2\pi | \frac{22}{7}
\frac{\pi}{4} | \pi/4 | 0.25\pi | \frac{1}{4}\pi | 45^\circ | \frac{\pi}{3}
12\pi | 12 \pi | 12\cdot\pi | \pi \cdot 12 | 37.699112 | 12
25\pi \text{ cm}^2 | 25\pi | 25 \pi \text{ square centimeters} | 25
90^\circ | 90 | 90^{\circ} | 90 \text{ degrees} | 89^\circ
60 | 60^\circ | 60\text{ mph} | 60 \text{ km/h} | 6
5 \text{ cm} | 5 | 5\text{ cm} | 5\mathrm{cm} | 6 \text{ cm}
12 \text{ inches} | 12 | 12 \text{ in} | 1
36 \text{ cm}^2 | 36 | 36 \text{ cm}^3 | 63
2^{10} | 1024 | 2^{11} | 4^5 | 32^2
2^{2005} | 2^{2005} | 2^{2004} | 2\cdot 2^{2004}
10! | 3628800 | 9! | 10 \cdot 9!
\binom{5}{2} | 10 | 20 | \frac{5!}{2!3!}
6.02 \times 10^{23} | 6.02\cdot 10^{23} | 602 \times 10^{21} | 6.02 \times 10^{22}
1.5 \times 10^{-5} | 0.000015 | 15 \times 10^{-6} | 1.5 \times 10^{5}
x=5 | 5 | x = 5 | y=5 | x=6 | x=5.0
5 | x=5 | x = 5.0 | x=6 | a = b = 5
y = 2x + 3 | y=3+2x | 2x+3 | y = 2x - 3 | y=2(x+1)+1
2x + 3 | 3 + 2x | y=2x+3 | 2x-3 | 2(x+1.5) | 3x+2
x^2 + 2x + 1 | (x+1)^2 | x^2+1+2x | (x-1)^2 | 1+2x+x^{2} | (x+1)(x+1) | x(x+2)+1
(x-2)(x+3) | (x+3)(x-2) | x^2+x-6 | x^2-x-6
6x^3-4x^2+9x-3 | -3+9x-4x^2+6x^3 | 6x^3-4x^2+9x+3
\frac{x}{2} | 0.5x | x/2 | \frac{1}{2}x | \frac{2}{x}
x^{-1} | \frac{1}{x} | 1/x | x
\frac{x^2-1}{x+1} | x-1 | x+1
3xy^2 | 3y^2x | 3x y^2 | 3x^2y
a^2-b^2 | (a+b)(a-b) | (a-b)^2 | -b^2+a^2
2n+1 | 1+2n | 2k+1 | 2n-1
\frac{n(n+1)}{2} | \frac{n^2+n}{2} | \frac{n(n-1)}{2}
e^{2} | e^2 | 7.389056 | e^{3}
\ln 2 | \ln(2) | 0.693147 | \log 2 | \ln 3
\log_2 8 | 3 | \log_{2} 8 | 2
\sin 30^\circ | \sin 30^{\circ} | \cos 30^\circ
\sin^2 x | (\sin x)^2 | \sin x^2 | 1-\cos^2 x
\frac{1}{\sin x} | \csc x | \sin x
3+4i | 4i+3 | 3-4i | 4+3i | 3 + 4 i
-1 + 2i | 2i - 1 | 1+2i | -1-2i
i | -i | i | \sqrt{-1}
(1,2) | (1, 2) | \left(1,2\right) | (2,1) | (1,2,3) | (1.0,2.0) | [1,2] | (\frac{2}{2}, \frac{4}{2})
(-\frac{1}{2}, 3) | (-0.5, 3) | \left(-\frac12,3\right) | (\frac{1}{2}, 3)
(3, \frac{\pi}{2}) | \left( 3, \frac{\pi}{2} \right) | (3, 90^\circ) | (\frac{\pi}{2},3)
(1,2,3) | (1, 2, 3) | (3,2,1) | 1,2,3
1,2 | 2,1 | 1, 2 | \{1,2\} | 1 \text{ and } 2 | 1,3 | 1
1,-2 | -2, 1 | -2,1 | 1,2
-3, 0, 3 | 0,3,-3 | 3,0,-3 | 0,3
\{1,2,3\} | \{3,2,1\} | \{1,2\} | \left\{1, 2, 3\right\} | \{1,2,4\}
\{\frac{1}{2}, 3\} | \{3, 0.5\} | \{0.5, 2\}
\{5\} | 5 | \{6\}
[0,1) | [0, 1) | [0,1] | (0,1) | [0, 1.0)
(-\infty, 3] | (-\infty,3] | (-\infty,3) | [3,\infty) | (-\infty, 4]
(2,\infty) | (2, \infty) | [2,\infty) | (2, +\infty)
(-\infty,-1)\cup(1,\infty) | (-\infty,-1) \cup (1,\infty) | (1,\infty)\cup(-\infty,-1) | (-1,1)
(-\infty,0)\cup(0,\infty) | (0,\infty) \cup (-\infty,0) | (-\infty,\infty)
[-2,7] | x \in [-2,7] | [-2, 7] | [-2,7)
x > 5 | x>5 | 5 < x | x \geq 5 | (5,\infty) | x < 5
x \le 3 | x \leq 3 | 3 \ge x | x < 3 | (-\infty, 3]
1 < x < 4 | 1<x<4 | 4 > x > 1 | 1 \le x < 4 | (1,4)
-2 \le x \le 2 | [-2,2] | -2 \leq x \leq 2
1 \pm \sqrt{2} | 1+\sqrt{2}, 1-\sqrt{2} | 1 \pm \sqrt 2 | 1 \pm \sqrt{3}
\pm 3 | 3,-3 | -3, 3 | 3
x = \pm 2 | \pm 2 | 2, -2 | x=2
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} | \begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{pmatrix} 1 & 2 \\ 4 & 3 \end{pmatrix} | \begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}
\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix} | \begin{pmatrix} -\frac{1}{3} \\ \frac23 \end{pmatrix} | \begin{pmatrix} 1/3 \\ 2/3 \end{pmatrix}
2x+3y=6 | 2x + 3y = 6 | 3y+2x=6 | 4x+6y=12 | 2x+3y=7 | 2x+3y-6=0
x^2+y^2=25 | y^2+x^2=25 | x^2+y^2=5 | x^2 + y^2 - 25 = 0
\text{(B)} | B | (B) | \text{B} | A | \text{(C)}
C | \text{C} | D
\text{Evelyn} | \text{Evelyn} | \text{evelyn} | \text{Carla}
\text{even} | \text{odd} | \text{even}
\text{east} | \text{East} | \text{west}
\infty | \infty | -\infty | 5
0 | 0.0 | -0 | 1 | \frac{0}{5} | 0\%
-5 | -5.0 | 5 | - 5 | -(5)
3:4 | 3:4 | 4:3
|x| | |x| | |-x| | x
\frac{a}{b} | a/b | \frac{b}{a}
\frac{243}{625} | 243/625 | 0.3888 | \frac{243}{624}
\frac{35}{64} | 0.546875 | \frac{64}{35} | 35/64
\frac{14}{3} | 4\frac{2}{3} | 4.67 | 4.666667
8\sqrt{3} | 8 \sqrt{3} | 13.856406 | 3\sqrt{8} | \sqrt{192}
\frac{9\sqrt{3}}{4} | \frac{9}{4}\sqrt{3} | 9\sqrt{3}/4 | 2.25\sqrt{3} | \frac{9\sqrt{2}}{4}
16\sqrt{3}\pi | 16\pi\sqrt{3} | 16\sqrt{3}
\frac{1}{\sqrt{2}} | \frac{\sqrt{2}}{2} | \sqrt{2}
1+\sqrt{3} | \sqrt{3}+1 | 1-\sqrt{3} | 2.732051
4210_{5} | 4210_5 | 4211_5
204_5 | 204_5 | 205_5
11111100 | 11111100 | 11111101
0.1 + 0.2 | 0.3 | 0.4
1 - \frac{1}{2^{10}} | \frac{1023}{1024} | \frac{1}{1024}
2 \cdot 3 + 4 | 10 | 14
(2+3) \cdot 4 | 20 | 14
100 - 37 | 63 | 137
\frac{\frac{1}{2}}{\frac{3}{4}} | \frac{2}{3} | \frac{3}{8}
12345678901234567890 | 12345678901234567890 | 12345678901234567891
0.000001 | 10^{-6} | 0.00001
1,2,3,4 | 4,3,2,1 | 1,2,3
t = \frac{3}{2} | \frac{3}{2} | 1.5 | t=1.5
f(x) = x^2 | x^2 | f(x)=x^2 | 2x
\theta = \frac{\pi}{6} | \frac{\pi}{6} | \frac{\pi}{3}
\frac{5\pi}{6} | 5\pi/6 | \frac{5}{6}\pi | 150^\circ
\$32{,}500 | 32500 | 32,500 | 3250
\text{5 dollars} | 5 | 6
8 \text{ hours} | 8 | 8 \text{ hours}
20\% | 0.2 | 20 | 0.02
3.0 | 3 | 3.00 | 3.1
1.25 | \frac{5}{4} | 1\frac14 | 125\% | 1.3
"""


def verdict(reference: str, answer: str) -> int:
    gold, found = (parse(f"${text}$", parsing_timeout=None) for text in (reference, answer))
    return int(verify(gold, found, timeout_seconds=None))


def main() -> None:
    print("# Made by math_table.py with math_verify 0.9.0: reference, answer, verdict.")
    for line in GROUPS.strip().splitlines():
        # A formula may have strokes of its own, without spaces.
        reference, *answers = line.split(" | ")
        for answer in answers:
            print(f"{reference}\t{answer}\t{verdict(reference, answer)}")


if __name__ == "__main__":
    main()
